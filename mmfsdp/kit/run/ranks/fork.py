"""Fork this process: a child has all that was imported here, and otherwise begins as a process of its own would.

A rank that starts as a Python of its own spends most of its start on imports: some 7 CPU seconds for torch and
transformers. Eight ranks on two cores wait half a minute for what one of them could import for all.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

WARM = "mmfsdp.kit.run.ranks.warm"
"""The module that runs as the warm process."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class Fork:
    """A forked process, as whoever has forked it sees it: what submitit asks of a `subprocess.Popen`."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        """Return its exit code, the negative number of the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def may_fork() -> bool:
    """Return True if a fork of this process can be a process of its own.

    Not with a second thread, whose locks would stay closed in the child; and not on macOS, whose system libraries fail
    in a fork (Python's documentation of multiprocessing, "Contexts and start methods").
    """
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1


def forked_from() -> str:
    """Return of what this process is a fork, as rank logs tell it; "" if it is a Python of its own."""
    if multiprocessing.parent_process() is None:
        return ""
    return "a fork of the warm process" if WARM in sys.orig_argv else "a fork of the process that imports for all ranks"


@contextmanager
def without_threads() -> Iterator[None]:
    """Import without the threads that numpy's OpenBLAS would start at once, one for each core."""
    before = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[BLAS_THREADS]
        if before is not None:
            os.environ[BLAS_THREADS] = before


def fork(work: Callable[[], object]) -> Fork:
    """Call `work` in a fork of this process, which ends after it: 0, what SystemExit says, or 1 after a traceback."""
    context = multiprocessing.get_context("fork")
    # The name of a process that is nobody's child: a person's code may ask for it, to tell ranks from data workers.
    process = context.Process(target=as_own_process, args=(work,), name="MainProcess")
    gc.freeze()  # memory that a collection has written to is shared no longer (Python's documentation of gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process.start()
    return Fork(process)


def fork_alone(work: Callable[[], object]) -> int:
    """Call `work` in a fork that may outlive this process, and return the fork's process number.

    Signals that are blocked here stay blocked there. What is to be done at the end of this process is not done there.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        _begin()
        work()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _begin() -> None:
    """Set signals and random numbers as a new Python has them."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # a function of the parent's; a new process keeps what is ignored
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does this by itself
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def as_own_process(work: Callable[[], object]) -> None:
    """Call `work` with signals and random numbers as a new Python has them; then do what Python does at its end."""
    _begin()
    try:
        work()
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()


def set_output(log: int) -> None:
    """Have this process read nothing, and print into the open file of this number, without keeping text back."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.__stdout__ = _unbuffered(1, sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2, sys.stderr)  # type: ignore[misc]


def _unbuffered(number: int, like: TextIO) -> Any:
    """Return a text stream as `python -u` has it (Python/pylifecycle.c: create_stdio)."""
    file = open(number, "wb", buffering=0, closefd=False)
    return io.TextIOWrapper(file, encoding=like.encoding, errors=like.errors, write_through=True)
