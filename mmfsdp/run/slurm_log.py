"""The log of a Slurm job: how the job ended, and what it waits for, where neither the ranks nor squeue tell."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from .folder import last_log_lines, log_paths
from .record import RunState, Status, advice, library_error

SCRIPT_FILE = "script.started"
"""File in logs/: left by the first line of the batch script, once its login shell has read its start files."""

SLOW_LOGIN_S = 20.0
"""Seconds after which the login shell of a batch script is slow."""


def slow_login(folder: Path) -> str:
    """Return words on a batch script whose login shell still reads its start files; empty if it does not.

    Slurm's daemon makes the job's log when it starts the script; the script's first line leaves a file.
    """
    logs = [path for rank, path in log_paths(folder) if rank == 0]
    if (folder / "logs" / SCRIPT_FILE).exists() or not logs:
        return ""
    seconds = time.time() - logs[-1].stat().st_mtime
    if seconds < SLOW_LOGIN_S:
        return ""
    return f"; its login shell has read start files, such as ~/.bash_profile, for {seconds:.0f} s: what is slow there?"


_CANCELLED_LINE = re.compile(r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*")
"""Printed into the job's log by the daemon of its node: `CANCELLED AT 2026-01-01T12:00:00 DUE TO TIME LIMIT`."""
_CAUSES = {"": "CANCELLED", "TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}


def state_in_log(folder: Path) -> str:
    """Return Slurm's final state of a job by the job's own log, such as TIMEOUT; empty if the log has none."""
    causes = _CANCELLED_LINE.findall(last_log_lines(folder, 0, size=40_000))
    return _CAUSES.get(causes[-1], "") if causes else ""


_TASK_ERROR = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)


def task_error(log: str) -> tuple[int, str] | None:
    """Return the first rank that ended badly by what srun has printed, and words such as `2 on node7: Killed`."""
    match = _TASK_ERROR.search(log)
    if not match:
        return None
    node, tasks, error = match.groups()
    rank = int(re.split("[,-]", tasks)[0])
    return rank, f"{rank} on {node}: {error}"


def silent_death(folder: Path, statuses: list[dict[str, Any]], reason: str) -> RunState:
    """Return the state of a job whose ranks reported nothing at their end: what srun printed about them."""
    log = last_log_lines(folder, 0, size=40_000)
    if ended_rank := task_error(log):
        rank, error = ended_rank
        last_lines = last_log_lines(folder, rank)
        if rank < len(statuses) and not statuses[rank]:
            error = f"{error} before it started{_own_words(last_lines)}"
        elif ended := library_error(last_log_lines(folder, rank, size=64_000)):
            error = f"{error}, ended by a library: {ended}{advice(ended)}"
        return RunState(Status.FAILED, f"rank {error}", rank, last_lines)
    lines = log.strip().splitlines()
    if lines:
        return RunState(Status.FAILED, lines[-1][:500], traceback=log[-4000:])
    words = f"the job left no log, and no rank has reported anything{f' ({reason})' if reason else ''}"
    hint = f"; if its first node cannot see {folder}, put launch.folder where all nodes can write"
    return RunState(Status.FAILED, words + hint)


def _own_words(log: str) -> str:
    """Return the last line that a rank has printed itself, not srun about it, after a colon; "" if there is none."""
    lines = [line for line in log.splitlines() if line.strip() and not re.match("srun: |slurmstepd", line)]
    return f": {lines[-1][:300]}" if lines else ""
