"""The supervisor of a run: has its launcher start the ranks, watches every one of them, and writes the final state.

It leads a session of its own, in which all processes of a local run are, so that nothing that happens to the notebook
or terminal reaches them. submitit starts those, but would report a failed rank only after all others have ended.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...params import ParamError
from ..hangs.rank_server import remove
from .error_kinds import kind_of
from .files.breaks import KILLED
from .files.folder import Row, add_event, last_bytes, last_row, read_events
from .files.reasons import MEMORY, ON_PURPOSE, TIME_LIMIT, Reason
from .files.run_record import (
    RunRecord,
    RunState,
    Status,
    all_done,
    because,
    cancelled_state,
    failed_first,
    first_failure,
    write_status,
)
from .files.snapshot import Snapshot
from .launchers.launcher import Launcher, StartedRanks
from .launchers.registry import launcher_in_run
from .local import is_same_process, oom_kills, stop_processes
from .preempt import PREEMPT_SIGNAL
from .pretraining import pretrain_first
from .ranks.address import reserved_port
from .ranks.ask_ranks import prepare_sockets
from .ranks.hang import HangDetector
from .ranks.named_hang import with_cause
from .ranks.silent_ranks import death_words
from .slurm.slurm_log import LAST_WORDS_BYTES

POLL_S = 0.1
SETTLE_S = 0.3
"""Seconds after a first failure in which a rank that died silently is still taken for its cause."""
TOUCH_INTERVAL_S = 10.0
"""Seconds between two writings of status.json, by which other machines know that the supervisor lives."""
EXIT_TIMEOUT_S = 30.0
"""Seconds that processes may take to end after all ranks are done."""
PREEMPTED_EXIT_TIMEOUT_S = 180.0
"""The same after a preemption, where the next ranks wait for their end: a busy machine takes long to end a process."""


def take_care(folder: Path) -> None:
    """Supervise a run, or hand it to the scheduler that keeps it: for the process that `launch` starts."""
    record = wait_for_record(folder)
    try:
        launcher = launcher_in_run(folder, record)
    except ParamError as error:  # own code that was there at the launch
        write_status(folder, because(Status.FAILED, str(error)), finished=time.time())
        raise
    if launcher.has_supervisor:
        supervise(folder, record, launcher)
    else:
        launcher.submit(folder)


def supervise(folder: Path, record: RunRecord, launcher: Launcher) -> None:
    """Run one run from its folder, to its end."""
    supervisor = None
    try:
        supervisor = Supervisor(folder, record, launcher)
        state = supervisor.run()
        write_status(folder, replace(state, status=Status.STARTING))  # the cause now, the end once all is stopped
    except Exception as error:
        cause = f"the supervisor failed: {error}"
        state = because(Status.FAILED, cause, kind=kind_of(error), traceback=traceback.format_exc())
    if supervisor and supervisor.ranks:
        try:
            supervisor.ranks.end()
        except Exception:  # of a launcher of somebody's own: the state of the run is told all the same
            traceback.print_exc()
    stop_processes(record, folder)
    if supervisor and supervisor.sockets:
        remove(supervisor.sockets)
    write_status(folder, state, finished=time.time())
    if state.status is Status.FAILED:
        add_event(folder, "failed", step=last_row(folder).get("step", 0), text=state.reason)


def wait_for_record(folder: Path) -> RunRecord:
    """Return run.json, which the launching process writes once it knows this process's id.

    Of two processes that resume a run at the same time, only one finds its id there.
    """
    for _ in range(1000):
        record = RunRecord.read(folder)
        if record and record.pid == os.getpid():
            return record
        time.sleep(0.01)
    raise SystemExit(f"{folder} has no run.json for process {os.getpid()}")


class Supervisor:
    """One run and its ranks."""

    def __init__(self, folder: Path, record: RunRecord, launcher: Launcher):
        self.folder, self.record, self.launcher = folder, record, launcher
        self.began = time.time()
        self.end = time.monotonic() + 60 * record.timeout_min
        self.received_signal: int | None = None
        self.ranks: StartedRanks | None = None
        self.oom_kills = oom_kills()
        self.sockets = prepare_sockets(record) if launcher.here else None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._receive)
        for number in (signal.SIGUSR1, PREEMPT_SIGNAL):  # to all processes of a job: they are for the ranks
            signal.signal(number, signal.SIG_IGN)  # which submitit's processes between this one and the ranks inherit

    def _receive(self, number: int, _: Any) -> None:
        self.received_signal = number

    def run(self) -> RunState:
        """Start the ranks and watch them to the end; start them again each time they are preempted."""
        if self.record.pretrains and (state := pretrain_first(self.folder, self.stop_requested)):
            return state
        while True:
            state = self.stop_requested()
            if state is None:
                with reserved_port() as port:
                    self.ranks = self.launcher.start(self.folder, self.record, port=port)
                    state = self.watch(self.ranks)
            if state is not None:
                return state
            if self.ranks and (why := self.ranks.ended_place()):
                return RunState(Status.FAILED, why)
            step = last_row(self.folder).get("step", 0)
            add_event(self.folder, "requeued", step=step, text="preempted; the ranks are started again")
            for path in (self.folder / "logs").glob("rank*.*"):  # of the ranks that have ended
                path.unlink()

    def write_started(self, ranks: StartedRanks, waits_for: str) -> None:
        """Write into status.json that the ranks are started, or for what they wait, and that this process lives."""
        state = RunState(Status.QUEUED, Reason(waits_for)) if waits_for else RunState(Status.STARTING)
        write_status(self.folder, state, job=ranks.job_id, alive=time.time())

    def watch(self, ranks: StartedRanks) -> RunState | None:
        """Watch the ranks until all have ended or one has failed. Return None if they were preempted."""
        detector, touched, told = HangDetector(self.folder, self.record), -TOUCH_INTERVAL_S, ""
        look = self.look()
        while True:
            if not (self.folder / "run.json").exists():  # somebody has deleted it, and could not cancel the run then
                self.record.write(self.folder)
            waits_for = ranks.waits_for()
            if waits_for:
                self.end = time.monotonic() + 60 * self.record.timeout_min  # the time limit is the ranks'
            is_late = time.monotonic() > touched + TOUCH_INTERVAL_S
            if is_late or waits_for != told or not (self.folder / "status.json").exists():
                self.write_started(ranks, waits_for)
                touched, told = time.monotonic(), waits_for
            look, silent_ranks = self.look_again(look, ranks)
            if state := self.stop_requested() or self.failure(look, silent_ranks, ranks):
                return with_cause(self.look(), state)
            if all(report.get("state") in ("done", "preempted") for report in look.reports):
                break
            if state := detector.check():
                return state
            time.sleep(POLL_S)
        is_complete = all_done(look.reports)
        limit = EXIT_TIMEOUT_S if is_complete else PREEMPTED_EXIT_TIMEOUT_S
        end = time.monotonic() + limit
        while not ranks.done() and time.monotonic() < end:
            time.sleep(POLL_S)
        if is_complete:
            return RunState(Status.COMPLETED)
        if not ranks.done():
            return because(Status.FAILED, f"preempted, but its ranks did not end within {limit:g} s")
        return None

    def stop_requested(self) -> RunState | None:
        """Return the final state of a run that was cancelled or has reached its time limit."""
        if (self.folder / "cancel").exists():
            return cancelled_state(self.folder, self.record)
        if self.received_signal:
            if self.ranks and (why := self.ranks.ended_place()):  # whose end signals all its processes
                return RunState(Status.FAILED, why)
            return cancelled_state(self.folder, self.record, f"stopped by {signal.Signals(self.received_signal).name}")
        if time.monotonic() > self.end:
            return because(Status.FAILED, f"stopped after {self.record.timeout_min} min", kind=TIME_LIMIT)
        return None

    def failure(self, look: Snapshot, silent_ranks: list[int], ranks: StartedRanks) -> RunState | None:
        """Return the FAILED state of the first rank that failed; None if none has."""
        if not silent_ranks and not first_failure(look.reports):
            return None
        time.sleep(SETTLE_S)
        if why := ranks.ended_place():
            return RunState(Status.FAILED, why)
        look, silent_ranks = self.look_again(look, ranks)
        reported = first_failure(look.reports)
        log = last_bytes(self.folder / "logs" / "supervisor.log", size=40_000)
        if failure := self.launcher.failure(look, ranks, log):
            return failure
        if not silent_ranks:
            return reported
        rank = silent_ranks[0]
        words, kind = death_words(look, rank)
        if any(event["kind"] == KILLED and event.get("rank") == rank for event in self.new_events()):
            words, kind = "was killed on purpose", ON_PURPOSE
        elif not words:
            kind = MEMORY
            killed = "killed from outside, out of memory, or a crash"
            if oom_kills() > self.oom_kills:
                killed = "Linux has killed a process for lack of memory since the ranks started"
            words = f"died without a traceback: {killed}"
        last_lines = look.log(rank, size=LAST_WORDS_BYTES) or log[-LAST_WORDS_BYTES:]
        died = because(Status.FAILED, f"rank {rank} {words}", kind=kind, rank=rank, traceback=last_lines)
        return failed_first(died, reported)

    def new_events(self) -> list[Row]:
        """Return what has happened since this process began."""
        return [event for event in read_events(self.folder) if event.get("time", 0.0) >= self.began]

    def look(self) -> Snapshot:
        """Return a look at the run; whoever has deleted run.json has not ended it."""
        look = Snapshot(self.folder)
        look.record = self.record
        return look

    def look_again(self, before: Snapshot, ranks: StartedRanks) -> tuple[Snapshot, list[int]]:
        """Return a look at the run, and the ranks whose process has ended without a report of its end.

        before: an earlier look, by which the processes of the ranks are known.
        """
        over = ranks.done()
        ended_ranks = []
        for rank, report in enumerate(before.reports):
            if over or (self.launcher.here and report and not is_same_process(report["pid"], report["start"])):
                ended_ranks.append(rank)
        look = self.look()  # after the processes: a rank reports before it ends
        return look, [rank for rank in ended_ranks if look.report(rank).get("state") in (None, "running")]
