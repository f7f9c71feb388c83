"""Heartbeats of the ranks, and the detector that finds the rank that hangs: its number, what it was doing, its stack.

A rank writes what it is about to do into logs/rank<N>.beat. The detector runs in the supervisor of a local run, and in
the watchdog of a Slurm job, a process on rank 0's node. Slurm itself notices ranks that die, nodes that fail and the
time limit, but not a rank that hangs. To end the job the watchdog kills rank 0 (srun then ends the others), so that
it works in containers without Slurm's commands.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from ...hangs.rank_server import remove
from ...hangs.stacks import main_stack, waits_for_workers, without_callers
from ..files.folder import (
    heartbeat_path,
    last_bytes,
    last_log_lines,
    make_inner_folder,
    newest_lines,
    open_own,
    put_heartbeat,
    read_heartbeat,
    touch,
)
from ..files.history import BEAT, add_moment
from ..files.reasons import NOT_JOINED, SHARED_MEMORY, SILENCE
from ..files.reasons import NOT_STARTED as NEVER_STARTED
from ..files.run_record import RunRecord, RunState, Status, because, rank_status, write_status
from ..files.stages import JOINING, NOT_STARTED, SLOW_FACTOR, is_step, parsed, patience_s, progress_of, stage_of
from ..launchers.registry import launcher_in_run
from ..local import process_start
from .ask_ranks import sockets_here
from .named_hang import kind_of_hang, name_hang_of

NEVER_REPORTED = "start; can its node see launch.folder?"
"""The activity of a rank that has not reported anything: its process did not start, or it cannot see the folder."""
TOLD_LOG_BYTES = 4000
"""Bytes of the end of the log of a rank that hangs that are shown, before its stack."""
_NO_SHARED_MEMORY = re.compile(r"^RuntimeError: unable to .*</torch_\w+>: No space left", re.MULTILINE)
"""Printed by multiprocessing in a data worker that cannot hand over its batch, and goes on; its rank waits for it."""
STACK_SIGNAL = signal.SIGUSR1
"""Asks a rank to write the stacks of its threads into a file of its own."""
STACK_TIMEOUT_S = 5.0
"""Seconds that a rank may take to write its stack, and the file server to show it."""
MAX_STACK_BYTES = 100_000
SUSPENDED_S = 5.0
"""Seconds between two looks, which are at most one apart, after which this process was itself suspended."""


class Heartbeat:
    """The heartbeat of a rank: when it was last called, and what the rank was then about to do."""

    def __init__(self, folder: Path, rank: int):
        path = heartbeat_path(folder, rank)
        make_inner_folder(path.parent)
        touch(path)
        self._file = open_own(path, "r+b")  # what an earlier one has written stands until this one writes
        self._folder, self._rank = folder, rank
        written = read_heartbeat(folder, rank)
        self._stage = stage_of(written[0]) if written else NOT_STARTED

    def __call__(self, activity: str) -> None:
        """Report what this rank does from now on, such as `step 5 compute`."""
        put_heartbeat(self._file, activity, time.time())
        stage = stage_of(activity)
        if stage is not self._stage:
            self._stage = stage
            add_moment(self._folder, BEAT, activity, rank=self._rank)


class HangDetector:
    """Finds a rank that does not answer: the one that the others wait for.

    A heartbeat is as old as this process has seen no other one, by its own clock: the clocks of the ranks' machines and
    of the file server may differ from it by minutes.
    """

    def __init__(self, folder: Path, record: RunRecord):
        self.folder, self.record = folder, record
        self.limit_s = record.hang_timeout_s
        self.longest_step_s = 0.0
        self.last_check = self.awake_since = time.monotonic()
        self.activities = [NEVER_REPORTED] * record.ranks
        """The activity that each rank last reported."""
        self.changed = [0.0] * record.ranks
        """The time when each rank was seen to report that; 0 if it has reported nothing."""
        self._beats: list[tuple[str, float] | None] = [None] * record.ranks
        """Each rank's newest heartbeat."""

    def check(self) -> RunState | None:
        """Return the FAILED state that names the rank, or None while all ranks go on."""
        now = time.monotonic()
        if now - self.last_check > SUSPENDED_S:  # a laptop that slept, a job that Slurm suspended: so were the ranks
            self.awake_since = now
        self.last_check = now
        self._read_heartbeats(now)
        newest = max(self.changed)
        if not newest or now - max(newest, self.awake_since) < self._allowed_s():
            return None  # as long as one rank goes on, so do the others: they meet in every step
        return self._state_of_hang()

    def _state_of_hang(self) -> RunState:
        """Return the FAILED state: by what the ranks have entered, else by what they last reported."""
        slowest = min(range(self.record.ranks), key=lambda rank: progress_of(self.activities[rank]))
        named = name_hang_of(self.folder, self.record)
        rank = slowest if named is None else named.rank
        stack, log = "", ""
        if rank is not None:
            stack = ask_stack(self.folder, self.record, rank)
            log = last_log_lines(self.folder, rank, size=20_000)
        frames = main_stack(stack)
        if named is None:
            cause = f"rank {rank} does not answer (in {self.activities[slowest]}): it hangs"
            cause += f"; the limit is launch.silence_s, {self.limit_s:g} s"
            kind = _kind_of_silence(self.activities[slowest])
        else:
            where = self.activities[slowest if rank is None else rank]
            cause = f"{named.words(frames)}; no rank has reported for launch.silence_s, {self.limit_s:g} s"
            cause += f" (rank {slowest if rank is None else rank}: {where})"
            kind = kind_of_hang(named.hang)
        if waits_for_workers(frames) and _NO_SHARED_MEMORY.search(log):
            kind = SHARED_MEMORY
        traceback = newest_lines(log, TOLD_LOG_BYTES) + without_callers(stack)
        return because(Status.FAILED, cause, kind=kind, rank=rank, traceback=traceback)

    def _read_heartbeats(self, now: float) -> None:
        for rank in range(self.record.ranks):
            beat = read_heartbeat(self.folder, rank)
            if beat is None or beat == self._beats[rank]:
                continue
            last_activity = self.activities[rank]
            if is_step(last_activity):
                # A suspension is no part of a step.
                self.longest_step_s = max(self.longest_step_s, now - max(self.changed[rank], self.awake_since))
            self.changed[rank], self.activities[rank], self._beats[rank] = now, beat[0], beat

    def _allowed_s(self) -> float:
        """Return the seconds that may pass without a heartbeat, by what the ranks are doing."""
        in_step = all(map(is_step, self.activities))
        if not in_step or not self.longest_step_s:
            return max(patience_s(activity, self.limit_s) for activity in self.activities)
        return max(self.limit_s, SLOW_FACTOR * self.longest_step_s)


def _kind_of_silence(activity: str) -> str:
    """Return the kind of a hang whose ranks cannot tell what they have entered, by what the slowest one reported."""
    if activity == NEVER_REPORTED:
        return NEVER_STARTED
    return NOT_JOINED if parsed(activity).word == JOINING else SILENCE


def stack_path(folder: Path, rank: int, pid: int) -> Path:
    """Return the file into which the process of a rank writes its stacks."""
    return folder / "logs" / f"rank{rank}.{pid}.stack"


def ask_stack(folder: Path, record: RunRecord, rank: int) -> str:
    """Return the stacks of a rank, which it writes on STACK_SIGNAL (rank.py); "" if it does not. On Slurm all ranks do.

    A rank does not while a function in C holds Python's lock.
    """
    path = stack_path(folder, rank, rank_status(folder, rank).get("pid", 0))
    path.unlink(missing_ok=True)  # of an earlier question
    end = time.monotonic() + STACK_TIMEOUT_S
    if launcher_in_run(folder, record).print_stack(folder, record, rank, STACK_SIGNAL):
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
    return last_bytes(path, size=MAX_STACK_BYTES)


def watch_job(folder: Path, rank0_pid: int) -> None:
    """Watch the ranks of a job until its rank 0 ends, or end it."""
    record = RunRecord.read(folder)
    assert record, folder
    if os.getppid() != rank0_pid or process_start(rank0_pid) is None:
        return  # rank 0 has ended already
    detector = HangDetector(folder, record)
    while os.getppid() == rank0_pid:
        if not (folder / "run.json").exists():  # somebody has deleted it
            record.write(folder)
        failure = detector.check()
        if failure:
            write_status(folder, failure, finished=time.time())
        if failure or (folder / "cancel").exists():
            os.kill(rank0_pid, signal.SIGKILL)
            break
        time.sleep(min(1.0, record.hang_timeout_s / 10))
    if sockets := sockets_here():
        remove(sockets)
