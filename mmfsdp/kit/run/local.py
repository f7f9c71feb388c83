"""The processes of a run on this machine: which they are, and how to stop them.

All processes of a local run are in one session, which its supervisor leads.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from .files.folder import NO_FILE
from .files.run_record import RunRecord

START_TOLERANCE_S = 60.0
"""Readings of one process's start differ by up to this: they move with the wall clock. A pid is not reused so soon."""

LOOPBACK = "127.0.0.1"
"""Address by which the ranks of a local run find each other: no other machine reaches it."""

RUN_VARIABLE = "MMFSDP_RUN"
"""Environment variable that marks every process of a run; its value is the identity of the run."""
FOLDER_VARIABLE = "MMFSDP_FOLDER"
"""Environment variable of every process of a run: the run's folder. Somebody may copy the identity of another run."""


def process_start(pid: int) -> float | None:
    """Return the time when a process started (unix seconds); None if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError, OverflowError):
        return None


def available_cores() -> int:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory, in this process's cgroup and on the whole machine.

    Compare it with an earlier count. 0 where neither can be read, as on other systems.
    """
    files = [Path("/proc/vmstat")]
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":  # version 1
            files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
        elif not controllers:  # version 2
            files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
    kills = 0
    for file in files:
        for line in _lines(file):
            if line.startswith("oom_kill "):
                kills += int(line.split()[1])
    return kills


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def is_same_process(pid: int, start: float) -> bool:
    """Return True if the process with this id is alive and is the one that started at `start`."""
    actual_start = process_start(pid)
    return actual_start is not None and abs(actual_start - start) < START_TOLERANCE_S


def is_here(record: RunRecord) -> bool:
    """Return True if the run's processes are on this machine."""
    return record.host == socket.gethostname()


def is_supervised(record: RunRecord) -> bool:
    """Return True if the supervisor is alive. Only on its own machine."""
    return is_same_process(record.pid, record.start)


def belongs_to(process: psutil.Process, record: RunRecord, folder: Path) -> bool:
    """Return True if a process says itself that it is of this run.

    The files of a folder are no proof: they may name any process of whoever cancels the run.
    """
    try:
        environment = process.environ()
        same_folder = os.path.samefile(environment.get(FOLDER_VARIABLE, ""), folder)
    except (psutil.Error, OSError):  # it has ended, it is another user's, or it is of no run
        return False
    return same_folder and environment.get(RUN_VARIABLE) == record.identity


def processes_of(record: RunRecord, folder: Path) -> list[psutil.Process]:
    """Return the living processes of a run: those in its supervisor's session, also after the supervisor died."""
    leader_start = process_start(record.pid)
    if leader_start is not None and abs(leader_start - record.start) >= START_TOLERANCE_S:
        return []  # The pid was reused, so none of our processes is alive: they would have kept the session's id.
    leads = False
    with suppress(psutil.NoSuchProcess):
        leads = leader_start is not None and belongs_to(psutil.Process(record.pid), record, folder)
    processes = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != record.pid:
                continue
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            # Without its leader, a session of this id might be somebody else's: ask the process itself.
            ends = leader_start is not None and not process.cmdline()  # its memory is gone already, with what it says
            if leads or ends or belongs_to(process, record, folder):
                processes.append(process)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or is another user's
    return processes


def signal_rank(
    folder: Path,
    record: RunRecord,
    status: Mapping[str, Any],
    number: signal.Signals,
    *,
    belongs: Callable[[psutil.Process, RunRecord, Path], bool] = belongs_to,
) -> None:
    """Send a signal to the process of a rank, as its report names it, if that is a process of this run and alive.

    belongs: returns True for a process of this run.
    """
    pid, start = status.get("pid", 0), status.get("start", 0.0)
    with suppress(psutil.Error, ValueError, OverflowError, ProcessLookupError):
        if is_same_process(pid, start) and belongs(psutil.Process(pid), record, folder):
            os.kill(pid, number)


def stop_processes(record: RunRecord, folder: Path, *, grace_s: float = 2.0) -> bool:
    """Stop every process of a run but the caller: SIGTERM, then SIGKILL. Return True if all are gone."""
    for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + seconds
        signalled: set[psutil.Process] = set()
        while True:
            others = {process for process in processes_of(record, folder) if process.pid != os.getpid()}
            if not others:
                return True
            for process in others - signalled:
                with suppress(psutil.Error):  # it is gone
                    process.send_signal(number)
            signalled |= others
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    return False


def is_stopped(pid: int) -> bool:
    """Return True if somebody has stopped a process, by SIGSTOP or a debugger."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def file_age(path: Path) -> float | None:
    """Return the seconds since a file was last written; None if there is no such file."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except NO_FILE:
        return None
