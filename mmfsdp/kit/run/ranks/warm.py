"""The warm process: it has imported what runs import, and forks the supervisors of local runs, which fork their ranks.

`python -m mmfsdp.kit.run.ranks.warm` is started while a person still chooses, and ends after ten minutes without a
request or with whoever has started it. A launch uses one that is there and fits, and never waits for one.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import resource
import runpy
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ....params import RunParams
from ..launchers.registry import launcher_named
from ..local import FOLDER_VARIABLE, RUN_VARIABLE
from ..rank_count import is_on_cpu
from .fork import WARM, fork, may_fork, set_output, without_threads
from .rank_imports import AHEAD_OF_RUNS

IDLE_S = 600.0
"""Seconds without a request after which a warm process ends."""
ANSWER_S = 5.0
"""Seconds that a launch waits for the answer of a warm process; a fork takes some milliseconds."""
STARTER_POLL_S = 2.0
"""Seconds between two looks whether whoever has started it is there."""
MAX_REQUEST_BYTES = 4_000_000
MAX_SOCKET_PATH = 100
"""Bytes that the path of a socket may have; Linux takes 108 (man 7 unix)."""
SWITCH = "MMFSDP_WARM"
ROOM = "MMFSDP_ROOM"
"""Variable that makes room in the environment of a warm process, where each fork says of which run it is."""
ROOM_BYTES = 6000
"""A path has 4,096 at most."""
OF_THE_CALLER = ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST")
"""Environment variables that tell where a command was typed. All others must be the same: libraries read some of them
when they are imported."""
READ_LATE = ("TORCHINDUCTOR_CACHE_DIR", "TOKENIZERS_PARALLELISM")
"""Those that imports of torch and of tokenizers set in the process that launches. They are read when they are used."""
OWN_PREFIX = "MMFSDP_"
"""Of variables that this package reads when it needs them."""


# ---- for a launch ----


def start_in_warm(words: list[str], *, log: int, environment: dict[str, str]) -> int | None:
    """Have a warm process start `python -m mmfsdp.kit.run WORDS` in a session of its own. Return its pid.

    log: the file that it prints into. None if no warm process is there that fits: same versions, files of this package
    and environment.
    """
    path = socket_path(environment)
    if path is None or not path.exists():
        return None
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        request = {"words": words, "environment": environment, "folder": os.getcwd(), "umask": _umask()}
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:  # it was killed
            path.unlink()
            return None
        if _peer(connection) != os.getuid():
            return None
        content = json.dumps(request).encode()
        socket.send_fds(connection, [struct.pack("!I", len(content))], [log])
        connection.sendall(content)
        pid = json.loads(connection.recv(200)).get("pid")
        return pid if isinstance(pid, int) else None
    return None


def warm_up(params: RunParams) -> None:
    """Start a warm process for a launch of these parameters from this process, if it would use one.

    Not where the environment variable MMFSDP_WARM is 0.
    """
    if os.environ.get(SWITCH) == "0":
        return
    if launcher_named(params.launch.executor).here and is_on_cpu(params.train.device):
        start_warm()


started_here: dict[Path, subprocess.Popen[bytes]] = {}
"""The warm processes that this process has started, by their sockets."""


def start_warm() -> subprocess.Popen[bytes] | None:
    """Start a warm process for launches from this process, unless one is there or starts already; return it.

    It ends when this process does. None where runs are never forked, and where nothing was started.
    """
    path = socket_path(dict(os.environ))
    if path is None or path.exists() or (path in started_here and started_here[path].poll() is None):
        return None
    started_here[path] = subprocess.Popen(
        [sys.executable, "-m", WARM, str(path)],
        stdin=subprocess.PIPE,  # whose end tells it that this process is gone
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {ROOM: "x" * ROOM_BYTES},
        start_new_session=True,
    )
    return started_here[path]


def socket_path(environment: dict[str, str]) -> Path | None:
    """Return where a warm process listens that would do what a new process does in this environment; None without."""
    if sys.platform != "linux":
        return None
    folder = Path(environment.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"mmfsdp-warm-{os.getuid()}"
    path = folder / f"{key_of(environment)}.sock"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        if mine and len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
    return None


def key_of(environment: dict[str, str]) -> str:
    """Return a digest of what a process and its imports depend on: interpreter, files, environment, place, limits."""
    variables = {
        name: value
        for name, value in environment.items()
        if name not in OF_THE_CALLER + READ_LATE and not name.startswith(OWN_PREFIX)
    }
    values = [sys.executable, sys.version, sorted(variables.items()), files_of_package(), place()]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:24]


def files_of_package() -> list[Any]:
    """Return the time and size of each file of this package, and the time of each folder that packages are in."""
    files = []
    for path in sorted(Path(__file__).resolve().parents[3].rglob("*.py")):
        status = path.stat()
        files.append((str(path), status.st_mtime_ns, status.st_size))
    return [files, _installed()]


def _installed() -> list[tuple[str, int]]:
    """Return when something was last installed into each folder of packages: pip adds a folder for each of them."""
    folders = [entry for entry in sys.path if entry.endswith("site-packages") and os.path.isdir(entry)]
    return [(folder, os.stat(folder).st_mtime_ns) for folder in folders]


def place() -> list[Any]:
    """Return what a process has from the one that starts it: namespaces, control group, limits, priority, cores."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    values: list[Any] = [resource.getrlimit(getattr(resource, name)) for name in names]
    values += [os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))]
    values += [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid")]
    with suppress(OSError):
        values.append(Path("/proc/self/cgroup").read_text())
    return values


def _umask() -> int:
    """Return the umask of this process. `os.umask` would change it for a moment, also for other threads."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def _peer(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user


# ---- the warm process ----


def serve(path: Path) -> None:
    """Import, listen, and fork a process for each request, until nobody needs this process."""
    os.environ["SUBMITIT_LOG_LEVEL"] = "CRITICAL"  # as the supervisor sets it, which is too late here
    with without_threads():
        for module in AHEAD_OF_RUNS:
            import_module(module)
    gc.collect()
    if not may_fork():
        raise SystemExit("a library has started a thread: nothing can be forked")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    mine = os.stat(path).st_ino
    listener.listen(16)
    end = time.monotonic() + IDLE_S
    try:
        while time.monotonic() < end and starter_is_there():
            multiprocessing.active_children()  # reaps those that have ended
            if not select.select([listener], [], [], STARTER_POLL_S)[0]:
                continue
            end = time.monotonic() + IDLE_S
            connection, _ = listener.accept()
            with connection, suppress(Exception):  # whatever is sent: the next launch needs this process
                answer(connection, listener)
    finally:
        with suppress(OSError):
            if os.stat(path).st_ino == mine:
                path.unlink()
    os._exit(0)  # the runs go on: multiprocessing would wait for them


def starter_is_there() -> bool:
    """Return True while whoever has started this process holds the other end of its stdin."""
    return not select.select([0], [], [], 0)[0]


def answer(connection: socket.socket, listener: socket.socket) -> None:
    """Read a request, and fork a process that answers with its pid."""
    connection.settimeout(ANSWER_S)
    if _peer(connection) != os.getuid():
        return
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 1)
    try:
        (size,) = struct.unpack("!I", head)
        if size > MAX_REQUEST_BYTES or len(descriptors) != 1:
            return
        content = b""
        while len(content) < size:
            part = connection.recv(size - len(content))
            if not part:
                return
            content += part
        request = json.loads(content)

        def work() -> None:
            listener.close()
            become(request, descriptors[0], connection)

        fork(work)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def become(request: dict[str, Any], log: int, connection: socket.socket) -> None:
    """Be what the request asks for: a process of its own that runs `python -m mmfsdp.kit.run WORDS`.

    Answers once others can tell whose process this is. Without an answer, a launch starts another one.
    """
    os.setsid()
    set_output(log)
    os.close(log)
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    say_whose(request["environment"])
    with connection:
        connection.sendall(json.dumps({"pid": os.getpid()}).encode())
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = request["folder"]  # as `python -m` has it
    sys.argv = ["mmfsdp.kit.run", *request["words"]]
    runpy.run_module("mmfsdp.kit.run", run_name="__main__", alter_sys=True)


def say_whose(environment: dict[str, str]) -> None:
    """Write the run of this process into the memory that /proc/PID/environ shows, which a fork has from its parent.

    By it other processes know that they may signal this one (local.py: belongs_to). Raises OSError where there is no
    room: then the process cannot be told from others, and must not run.
    """
    # man 5 proc_pid_stat: fields 50 and 51 are the addresses of the environment; the second field may hold spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = ctypes.string_at(start, end - start)
    room = f"{ROOM}={'x' * ROOM_BYTES}\0".encode()
    at = block.find(room)
    lines = [f"{name}={environment[name]}" for name in (RUN_VARIABLE, FOLDER_VARIABLE)]
    content = os.fsencode("\0".join([*lines, f"{ROOM}="]))
    if at < 0 or len(content) >= len(room):
        raise OSError("the environment of the warm process has no room")
    ctypes.memmove(start + at, content.ljust(len(room) - 1, b" ") + b"\0", len(room))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
