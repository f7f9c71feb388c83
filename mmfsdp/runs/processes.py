"""Is that process still the one we started? Which processes belong to a run? Stop them all."""

from __future__ import annotations

import os
import signal
import time

import psutil

DRIFT = 60.0
"""Seconds by which two readings of one process's start may differ: they move with the wall clock. A process id does
not come round again so soon."""

RUN_VARIABLE = "MMFSDP_RUN"
"""Environment variable that marks every process of a run, with the identity of the run as its value."""


def oom_kills() -> int:
    """Processes that this machine's kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def process_start(pid: int) -> float | None:
    """When a process started (unix seconds), or None if it is gone or only waits to be buried."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
        return None


def alive(pid: int, start: float) -> bool:
    """Whether the process with this id is the one that started at `start`, and runs."""
    now = process_start(pid)
    return now is not None and abs(now - start) < DRIFT


def members(leader: int, start: float, identity: str) -> list[psutil.Process]:
    """The living processes of a run: those in the session of its leader, also when the leader itself is gone.

    A session id without its leader could be a stranger's; then only processes that carry `identity` count.
    """
    now = process_start(leader)
    if now is not None and abs(now - start) >= DRIFT:
        return []  # a stranger has the id: while one of ours lived, the system would not have given it away
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != leader:
                continue
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if now is not None or process.environ().get(RUN_VARIABLE) == identity:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it went while we looked, or is not ours to look at
    return found


def stop(leader: int, start: float, identity: str, *, grace: float = 2.0) -> bool:
    """TERM, then after `grace` seconds KILL, every process of a run but the caller. Whether all are gone."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + seconds
        told: set[psutil.Process] = set()
        while others := {p for p in members(leader, start, identity) if p.pid != os.getpid()}:
            for process in others - told:
                _send(process, number)
            told |= others
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        else:
            return True
    return False


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return  # it is gone, or another person's
