"""Pythons of tests as forks of one that has imported what they import: kernels of notebooks, and their rank servers.

A kernel spends some ten CPU seconds on imports until a lesson's own lines begin, and the process that makes the ranks
of its cells as many again. `python -m tests.forked_python` imports once, and then forks such processes on request. Each
is what `python -m MODULE ARGUMENTS` would be: it has the environment, working folder, standard streams and import path
of its request, a session of its own, no module of the tests, and no thread; only its imports are done.

Pages in tests/browser and notebooks in tests/course/test_course_command.py start theirs as a person's Jupyter does.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from mmfsdp.kit.run.ranks import warm
from mmfsdp.kit.run.ranks.fork import as_own_process, may_fork, without_threads
from mmfsdp.kit.run.ranks.rank_imports import AHEAD_OF_CELLS, without_collections
from tests import processes

AHEAD = ("ipykernel.ipkernel", "ipykernel.zmqshell", "ipywidgets", *AHEAD_OF_CELLS)
"""Modules that are imported before a fork: those that kernels import for lessons, and that rank servers import.

Not ipykernel.kernelapp, which reads JPY_PARENT_PID when it is imported.
"""
PARENT = "JPY_PARENT_PID"
"""The process with which a kernel ends."""
READ_LATE = (
    *warm.OF_THE_CALLER,
    *warm.READ_LATE,
    *("PYTHONPATH", PARENT, "JPY_SESSION_NAME"),  # become() follows the first two; nothing reads the third at imports
    *("CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "GIT_PAGER", "MPLBACKEND", "PAGER", "TERM"),  # a kernel sets them
    "PYDEVD_USE_FRAME_EVAL",  # and this one, for the debugger
    *("CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "TORCH_FR_BUFFER_SIZE"),  # for ranks; all forks are unbuffered
)
"""Environment variables with other values than when this process imported: what reads them does so later."""


# ---- for tests ----


class ForkServer:
    """The process that forks, in an environment. Ends with this one, or by `close`, and its forks with it."""

    def __init__(self, environment: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self.address = f"{self._folder.name}/socket"
        command = [sys.executable, "-u", "-m", "tests.forked_python", self.address]
        pipe = subprocess.PIPE
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            command, cwd=root, env=dict(environment), stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert self._process.stdout
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise RuntimeError("no process to fork from: stderr has why")

    def close(self) -> None:
        """End it."""
        self._process.communicate()  # it ends with its stdin
        self._folder.cleanup()


class ForkedPython:
    """What `subprocess.Popen([sys.executable, "-m", MODULE, ...], start_new_session=True)` is, by a fork."""

    def __init__(
        self,
        address: str,
        command: list[str],
        *,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool | None = None,
        start_new_session: bool,
    ):
        processes.note(str(command))
        python, flag, *words = command
        assert (python, flag, start_new_session, stderr) == (sys.executable, "-m", True, None), command
        read, write = "r" if text else "rb", "w" if text else "wb"
        theirs_in, self.stdin = (0, None) if stdin is None else self._pipe(stdin, write, ours=1)
        theirs_out, self.stdout = (1, None) if stdout is None else self._pipe(stdout, read, ours=0)
        self.stderr = None
        self.returncode: int | None = None
        self._connection = connected(address)
        self._connection.send({"words": words, "environment": dict(env), "folder": str(cwd or os.getcwd())})
        with socket.socket(fileno=os.dup(self._connection.fileno())) as other_name:
            socket.send_fds(other_name, [b"x"], [theirs_in, theirs_out, 2])
        for theirs in {theirs_in, theirs_out} - {0, 1}:
            os.close(theirs)
        answer = self._connection.recv()
        if not isinstance(answer, int):
            raise RuntimeError(answer)
        self.pid = answer

    @staticmethod
    def _pipe(kind: int, mode: str, *, ours: int) -> tuple[int, IO[Any]]:
        """Return the other process's end of a new pipe, and a file that is this one's end."""
        assert kind == subprocess.PIPE
        ends = os.pipe()
        return ends[1 - ours], open(ends[ours], mode)

    def poll(self) -> int | None:
        """Return its exit code, the negative number of the signal that ended it, or None while it runs."""
        if self.returncode is None and self._connection.poll():
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; return what `poll` does then."""
        if self.returncode is None:
            if not self._connection.poll(timeout):
                raise subprocess.TimeoutExpired(["a fork"], timeout or 0)
            self._end()
        return self.returncode

    def _end(self) -> None:
        try:
            self.returncode = self._connection.recv()
        except EOFError:  # with the process that forks, which kills its forks
            self.returncode = -signal.SIGKILL
        self._connection.close()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)


def connected(address: str) -> Connection:
    """Return a connection to the process that forks."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    return Connection(client.detach())


# ---- the process that forks ----


def serve(address: str) -> None:
    """Import, listen, and fork a process for each request, until stdin ends."""
    own = import_path_of(os.environ)
    libraries = [folder for folder in sys.path[1:] if folder not in own]
    before = dict(os.environ)
    import_ahead()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    print("ready", flush=True)
    forks: dict[int, tuple[int, Connection]] = {}  # that run, by the descriptors that tell of their ends
    ended: dict[Connection, int] = {}
    while True:
        for ready in wait([listener, 0, *forks, *ended]):
            if ready == 0:
                for pid, _ in forks.values():
                    with suppress(ProcessLookupError):  # it has just been forked
                        os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            elif ready is listener:
                client, _ = listener.accept()
                connection = Connection(client.detach())
                if pid := answer(connection, before, libraries, partial(become, address, listener)):
                    forks[os.pidfd_open(pid)] = pid, connection
            elif isinstance(ready, int):
                pid, connection = forks.pop(ready)
                os.close(ready)
                with suppress(OSError):  # whoever has asked may be gone
                    connection.send(exit_code(pid))
                ended[connection] = pid
            else:  # who has asked knows, and has closed the connection: until then a process that ended is a zombie
                os.waitpid(ended.pop(ready), 0)
                ready.close()


def exit_code(pid: int) -> int:
    """Return the exit code of a child that has ended, or the negative number of the signal that ended it."""
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert state
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def import_ahead() -> None:
    """Import what the forks use. What the imports print, a notebook would show: nothing may be printed."""
    with tempfile.TemporaryFile() as printed:
        streams = os.dup(1), os.dup(2)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        try:
            with without_threads(), without_collections():
                for module in AHEAD:
                    import_module(module)
        finally:
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
                os.close(stream)
        printed.seek(0)
        if text := printed.read().decode():
            raise SystemExit(f"the imports print:\n{text}")
    gc.collect()
    if not may_fork():
        raise SystemExit("a library has started a thread: nothing can be forked")


def answer(
    connection: Connection, before: dict[str, str], libraries: list[str], work: Callable[..., None]
) -> int | None:
    """Read a request, and return the pid of the fork for it, which answers with it; None where it was refused."""
    request = connection.recv()
    with socket.socket(fileno=os.dup(connection.fileno())) as other_name:
        _, streams, _, _ = socket.recv_fds(other_name, 1, 3)
    try:
        different = different_variables(before, request["environment"])
        if different:
            connection.send(f"{different}: imports may read these; they had other values when they were done")
            return None
        return fork(partial(work, connection, request, streams, libraries))
    finally:
        for stream in streams:
            os.close(stream)


def fork(work: Callable[[], None]) -> int:
    """Call `work` in a fork of this process, and end it as Python ends; return the pid.

    Not by multiprocessing, which tells a process that it is a child, and how its own children start.
    """
    gc.freeze()  # memory that a collection has written to is shared no longer (Python's documentation of gc.freeze)
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        as_own_process(work)
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    finally:
        os._exit(status)


def different_variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of variables that imports may have read, and that have other values now."""
    names = set(before) | set(now)
    different = [name for name in names if before.get(name) != now.get(name)]
    return sorted(name for name in different if name not in READ_LATE and not name.startswith(warm.OWN_PREFIX))


def import_path_of(environment: Mapping[str, str]) -> list[str]:
    """Return what PYTHONPATH adds to the import path of a Python that starts in this folder."""
    return [os.path.abspath(folder) for folder in environment.get("PYTHONPATH", "").split(os.pathsep)]


def become(
    address: str,
    listener: socket.socket,
    connection: Connection,
    request: dict[str, Any],
    streams: list[int],
    libraries: list[str],
) -> None:
    """Be what the request asks for: a process of its own that runs `python -m MODULE ARGUMENTS`."""
    from mmfsdp.kit.widgets.ranks_cell import ranks_magic

    listener.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    forker = str(os.getppid())
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT in os.environ:
        os.environ[PARENT] = forker
    sys.path[:] = [os.getcwd(), *dict.fromkeys([*import_path_of(os.environ), *libraries])]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    ranks_magic.Popen = partial(ForkedPython, address)  # type: ignore[misc, assignment]
    with connection:
        connection.send(os.getpid())
    module, *sys.argv[1:] = request["words"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(sys.argv[1])
