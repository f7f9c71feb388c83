"""Processes that tests start. A test that starts one is marked `real`; tests/conftest.py has it fail otherwise."""

from __future__ import annotations

import functools
import multiprocessing.process
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

started: list[str] = []
"""What was started since `note_processes`, in order."""

_refusal: Callable[[str], BaseException] | None = None
"""Makes the exception that is raised in place of starting a process; None where processes may be started."""


def note_processes() -> None:
    """Note in `started` what this process starts from now on; raise where `refuse` says so.

    `multiprocessing`, and torch's with it, starts all its processes by `BaseProcess.start`; submitit, asyncio,
    Playwright and Jupyter start theirs by `subprocess.Popen`.
    """
    subprocess.Popen.__init__ = _noting(subprocess.Popen.__init__)  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.start = _noting(multiprocessing.process.BaseProcess.start)  # type: ignore


def refuse(exception: Callable[[str], BaseException] | None) -> None:
    """Raise `exception(what)` where a process would be started; None allows processes again."""
    global _refusal
    _refusal = exception


def note(what: str) -> None:
    """Note a process that is about to be started for this one. Raises where processes are refused."""
    started.append(what)
    if _refusal:
        raise _refusal(what)


def _noting(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def noted_start(self: Any, *args: Any, **kwargs: Any) -> None:
        command = kwargs.get("args", args[0] if args else self)
        if not _does_not_count(command):
            note(str(command))
        start(self, *args, **kwargs)

    return noted_start


def _does_not_count(command: Any) -> bool:
    """Return True for processes that a test may start without being `real`.

    Compilers, which triton calls, and what `ctypes.util.find_library` calls at some imports: whether they start depends
    on caches. And git's answer about the commit, which each record of a run asks for.
    """
    if not isinstance(command, list):
        return False
    tools = ("ldconfig", "gcc", "cc", "ld", "objdump", "ptxas")
    return Path(str(command[0])).name in tools or command[:2] == ["git", "rev-parse"]


def in_fresh_python(code: str, *arguments: str, **options: Any) -> str:
    """Run code in a Python that has imported nothing yet, and that starts no process; return what it prints.

    A test that is not marked `real` may do this. Raises AssertionError with the messages if the code fails.
    """
    global _refusal
    first = "import tests.processes as p; p.note_processes(); p.refuse(lambda what: SystemExit(f'started {what}'))\n"
    command = [sys.executable, "-c", first + code, *arguments]
    refusal, _refusal = _refusal, None
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    finally:
        _refusal = refusal
        started.pop()
    assert done.returncode == 0, done.stderr
    return done.stdout
