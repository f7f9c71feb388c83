"""Heartbeats of the ranks, and the detector that finds the rank that hangs: its number, what it was doing, its stack.

A rank writes what it is about to do into logs/rank<N>.beat. The detector runs in the supervisor of a local run, and in
the watchdog of a Slurm job: a process beside rank 0. Slurm itself notices ranks that die, nodes that fail and the time
limit, but not a rank that hangs. To end the job the watchdog kills rank 0 (srun then ends the others), so that it works
in containers without Slurm's commands.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from .folder import heartbeat_path, last_log_lines, open_own
from .record import RunRecord, RunState, Status, rank_status, rank_statuses, write_status
from .slurm_state import scancel

SLOW_FACTOR = 5
"""Multiple of the limit that the first step and checkpoints may take; any other step, the longest one so far."""
PHASES = ("starting", "joining", "building", "measuring", "wrapping", "taking", "step", "trained")
"""First words of what ranks say that they do, in the order in which they do it."""
STEP_PARTS = ("data", "compute", "held-out", "save")
"""Words after `step N`, in order."""
NOT_STARTED = "start; can its node see launch.folder?"
"""The activity of a rank that has not reported anything: its process did not start, or it cannot see the folder."""
STACK_DUMP_S = 0.5
"""Seconds that a rank may take to write its stack into its log."""
CLOCK_TOLERANCE_S = 60.0
"""Seconds that other ranks of a job may seem to have started before rank 0; the nodes' clocks differ."""
SUSPENDED_S = 5.0
"""Seconds between two looks, which are at most one apart, after which this process was itself suspended."""
LAUNCH_FAILED = re.compile(r"^srun: error: .*launch failed.*$", re.MULTILINE)


class Heartbeat:
    """The heartbeat of a rank: when it was last called, and what the rank was then about to do."""

    def __init__(self, folder: Path, rank: int):
        path = heartbeat_path(folder, rank)
        path.parent.mkdir(exist_ok=True)
        self._file = open_own(path, "wb")

    def __call__(self, activity: str) -> None:
        """Report what this rank does from now on, such as `step 5 compute`."""
        os.pwrite(self._file.fileno(), f"{activity:<40}\n".encode(), 0)


class HangDetector:
    """Finds a rank that does not answer: one that is stopped by a signal, or the one that the others wait for.

    since: heartbeats before this time (unix seconds) are of an earlier start of the run. dump_stack: makes the process
    of a rank write its stack into its log.
    """

    def __init__(
        self, folder: Path, record: RunRecord, *, since: float, dump_stack: Callable[[psutil.Process | None], None]
    ):
        self.folder, self.ranks, self.limit_s = folder, record.ranks, record.hang_timeout_s
        self.since, self.dump_stack = since, dump_stack
        self.longest_step_s = 0.0
        self.last_check = self.awake_since = time.time()
        self.heartbeats = [(0.0, NOT_STARTED)] * self.ranks
        """When each rank last reported what it does, and what that is."""

    def check(self, processes: Mapping[int, psutil.Process]) -> RunState | None:
        """Return the FAILED state that names the rank, or None while all ranks go on.

        processes: those of the ranks on this machine. Of the others only their heartbeats are known.
        """
        now = time.time()
        if now - self.last_check > SUSPENDED_S:  # a laptop that slept, a job that Slurm suspended: so were the ranks
            self.awake_since = now
        self.last_check = now
        self._read_heartbeats()
        newest = max(at for at, _ in self.heartbeats)
        if not newest:
            return None
        silence_s = now - max(newest, self.awake_since)
        if silence_s < self.limit_s:
            return None  # as long as one rank goes on, so do the others: they meet in every step
        for rank, process in processes.items():
            with suppress(psutil.Error):  # it ended just now
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    return self._failed(rank, "it is stopped by a signal")
        if silence_s < self._allowed_s():
            return None
        hung_rank = min(range(self.ranks), key=lambda rank: _progress(self.heartbeats[rank][1]))
        self.dump_stack(processes.get(hung_rank))
        return self._failed(hung_rank, "it hangs")

    def _read_heartbeats(self) -> None:
        for rank in range(self.ranks):
            path = heartbeat_path(self.folder, rank)
            try:
                at, activity = path.stat().st_mtime, path.read_text().strip()
            except FileNotFoundError:
                continue
            if at < self.since:
                continue
            last_at, last_activity = self.heartbeats[rank]
            if last_activity.startswith("step") and "save" not in last_activity:
                self.longest_step_s = max(self.longest_step_s, at - last_at)
            self.heartbeats[rank] = (at, activity)

    def _allowed_s(self) -> float:
        """Return the seconds that may pass without a heartbeat, by what the ranks are doing."""
        in_step = all(activity.startswith("step") and "save" not in activity for _, activity in self.heartbeats)
        if not in_step or not self.longest_step_s:
            return SLOW_FACTOR * self.limit_s
        return max(self.limit_s, SLOW_FACTOR * self.longest_step_s)

    def _failed(self, rank: int, why: str) -> RunState:
        _, activity = self.heartbeats[rank]
        reason = (
            f"rank {rank} does not answer (in {activity}): {why}; the limit is launch.silence_s, {self.limit_s:g} s"
        )
        return RunState(Status.FAILED, reason, rank, last_log_lines(self.folder, rank))


def dump_stack_here(process: psutil.Process | None) -> None:
    """Make a rank on this machine write its stack into its log: faulthandler does so on SIGUSR1 (rank.py)."""
    if process is None:
        return
    with suppress(psutil.Error):  # it ended just now
        process.send_signal(signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)


def _progress(activity: str) -> tuple[int, int, int]:
    """Return how far a rank is as (phase, step, part of the step), by what it last reported."""
    words = [word.rstrip(":,") for word in activity.split()] or [""]
    phase = PHASES.index(words[0]) if words[0] in PHASES else -1
    if words[0] != "step" or len(words) < 3:
        return phase, 0, 0
    return phase, int(words[1]), STEP_PARTS.index(words[2]) if words[2] in STEP_PARTS else 0


def start_watchdog(folder: Path) -> None:
    """Start the watchdog of this job, from rank 0. It ends when rank 0 does."""
    command = [sys.executable, "-m", "mmfsdp.run", str(folder), "watchdog", str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def watch_job(folder: Path, *, rank0_pid: int) -> None:
    """Watch the ranks of a job until its rank 0 ends, or end it."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # Slurm sends them to every process of the job
        signal.signal(number, signal.SIG_IGN)
    record = RunRecord.read(folder)
    assert record, folder
    if os.getppid() != rank0_pid:
        return  # rank 0 has ended already
    rank0 = psutil.Process(rank0_pid)
    since = rank0.create_time() - CLOCK_TOLERANCE_S
    detector = HangDetector(folder, record, since=since, dump_stack=_dump_stacks)
    while rank0.is_running() and os.getppid() == rank0_pid:
        if not (folder / "run.json").exists():  # somebody has deleted it
            record.write(folder)
        if (folder / "cancel").exists():
            return rank0.kill()
        processes = {0: rank0}  # of the ranks on this node, as they themselves reported
        for rank in range(1, record.ranks // record.nodes):
            status = rank_status(folder, rank)
            is_new = status.get("time", 0.0) > since and status.get("state") == "running"
            if is_new and psutil.pid_exists(status["pid"]):
                processes[rank] = psutil.Process(status["pid"])
        failure = absent_rank(folder, record, since) or detector.check(processes)
        if failure:
            write_status(folder, failure, finished=time.time())
            return rank0.kill()
        time.sleep(min(1.0, record.hang_timeout_s / 10))


def absent_rank(folder: Path, record: RunRecord, since: float) -> RunState | None:
    """Return the FAILED state that names a rank that never started: srun does not end the others, which may go on."""
    absent = [rank for rank, status in enumerate(rank_statuses(folder, record)) if not status]
    if not absent:
        return None
    srun_error = LAUNCH_FAILED.search(last_log_lines(folder, 0, size=1 << 16))
    if not srun_error and time.time() - since < SLOW_FACTOR * record.hang_timeout_s:
        return None
    from submitit import JobEnvironment  # half of the watchdog's start, and seldom needed

    node = JobEnvironment().hostnames[absent[0] // (record.ranks // record.nodes)]
    reason = f"rank {absent[0]} did not start on {node}"
    if srun_error:
        reason += f" ({srun_error[0]})"
    reason += f"; if that node cannot see {folder}, put launch.folder where all nodes can write"
    return RunState(Status.FAILED, reason, absent[0])


def _dump_stacks(process: psutil.Process | None) -> None:
    """Make all ranks write their stacks into their logs, also those on other nodes."""
    if scancel("--signal=USR1", os.environ["SLURM_JOB_ID"]):
        dump_stack_here(process)  # scancel is missing: only ranks on this node can be reached
    else:
        time.sleep(STACK_DUMP_S)
