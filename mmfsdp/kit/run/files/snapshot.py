"""One look at a run: each file of its folder is read once, when it is first asked for.

Whoever runs it writes these files in an order: a rank writes metrics and heartbeats, then the report of its end; the
batch script leaves its exit code after the ranks; the supervisor writes the final state into status.json, and ends. A
look reads them in the opposite order, whatever is asked for first: a state that is final has all files of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ....params.base import without_controls
from ....params.findings import OF_DATA, Finding
from ..local import is_here, is_supervised
from .folder import (
    LAST_ROWS_BYTES,
    NO_FILE,
    PathLike,
    Row,
    last_log_lines,
    metrics_lines,
    metrics_of,
    newest_lines,
    newest_metrics,
    read_file,
    read_heartbeat,
    read_result,
)
from .plan_file import read_plan
from .run_record import JOB_NUMBER, MAX_REASON, RunRecord, RunState, rank_status, state_of_values, status_values

T = TypeVar("T")

EXIT_CODE_FILE = "ranks.end"
"""File in logs/: the exit code of srun, written by the batch script after all ranks ended."""
LOG_BYTES = 64_000
"""Bytes that are read of the end of a rank's log."""


class Snapshot:
    """A run at one moment, as its files tell.

    All that is said of a run (its state, its ranks, what is wrong, how far it is) is a function of this.
    """

    def __init__(self, folder: PathLike, *, last_bytes: int = LAST_ROWS_BYTES):
        """last_bytes: of the metrics of each rank, the newest."""
        self.folder, self.last_bytes = Path(folder), last_bytes
        self.time = time.time()
        self._of_ranks: dict[tuple[str, int], Any] = {}
        self._texts: dict[str, str | None] = {}

    @cached_property
    def record(self) -> RunRecord | None:
        """Content of run.json; None if it is missing or damaged."""
        return RunRecord.read(self.folder)

    @cached_property
    def supervised(self) -> bool:
        """False if its supervisor, or the process that submits it, was on this machine and has ended."""
        record = self.record
        return record is None or not is_here(record) or is_supervised(record)

    @cached_property
    def values(self) -> Row:
        """Content of status.json; {} if it is missing or damaged."""
        _ = self.supervised  # before: it writes this file, and ends
        return status_values(self.folder)

    @property
    def status(self) -> RunState:
        """The state in status.json; QUEUED if there is none."""
        return state_of_values(self.values)

    @cached_property
    def cancelled(self) -> bool:
        """True if somebody has asked for its end."""
        return (self.folder / "cancel").exists()

    @cached_property
    def stopped(self) -> str:
        """The reason why a callback ended the training before its last step; empty if none has, or if it goes on."""
        _ = self.values
        return str(read_result(self.folder).get("stopped", ""))[:MAX_REASON]

    @cached_property
    def job(self) -> str | None:
        """Its Slurm job, such as 123, 123_4 or, on another cluster, 123;gpu; None before it is submitted.

        It becomes arguments of Slurm's commands, so anything but numbers and a name is no job.
        """
        number = str(self.values.get("job", ""))
        if JOB_NUMBER.fullmatch(number):
            return number
        # submitit's file tells, too, if status.json was deleted; a resumed run has no old one (Run.resume).
        for path in (self.folder / "logs").glob("[0-9]*_submitted.pkl"):
            number = path.name.removesuffix("_submitted.pkl")
            if JOB_NUMBER.fullmatch(number):
                return number
        return None

    @cached_property
    def exit_code(self) -> int | None:
        """The exit code that a batch script has left; None before its end."""
        _ = self.values
        try:
            return int(self.text(f"logs/{EXIT_CODE_FILE}") or "")
        except ValueError:
            return None

    @cached_property
    def notices(self) -> list[Finding]:
        """The warnings about its data that its launch gave, in the order of `OF_DATA`; [] where nobody has planned it.

        Somebody else may have written them.
        """
        plan = read_plan(self.folder).get("plan")
        lint = plan.get("lint") if isinstance(plan, dict) else None
        found = []
        for each in lint if isinstance(lint, list) else ():
            if isinstance(each, dict) and each.get("code") in OF_DATA:
                words = without_controls(str(each.get("message", "")))[:MAX_REASON]
                found.append(Finding("warning", each["code"], words))
        return sorted(found, key=lambda finding: OF_DATA.index(finding.code))

    def text(self, name: str) -> str | None:
        """Return what a small file of the folder holds; None if there is none."""
        if name not in self._texts:
            try:
                self._texts[name] = read_file(self.folder / name).decode("utf-8", "replace")
            except NO_FILE:
                self._texts[name] = None
        return self._texts[name]

    def report(self, rank: int) -> Row:
        """Return what a rank last reported of its start or end; {} if it has not reported."""
        _ = self.exit_code  # before: it is written after the ranks' reports
        return self._once("report", rank, lambda: rank_status(self.folder, rank))

    @cached_property
    def reports(self) -> list[Row]:
        """All reports of the ranks, in their order."""
        return [self.report(rank) for rank in range(self.record.ranks if self.record else 0)]

    def beat(self, rank: int) -> tuple[str, float] | None:
        """Return what a rank last said that it does, and when; None if there is nothing."""
        _ = self.report(rank)
        return self._once("beat", rank, lambda: read_heartbeat(self.folder, rank))

    def rows(self, rank: int = 0) -> list[Row]:
        """Return the newest metrics of a rank, one row per step."""
        return self._once("rows", rank, lambda: metrics_of(self._metrics(rank)))

    def last_row(self, rank: int = 0) -> Row:
        """Return a rank's newest metrics; {} if there are none.

        Whoever waits for a run looks ten times a second, and needs no other row.
        """
        return self._once("last row", rank, lambda: newest_metrics(self._metrics(rank)))

    def _metrics(self, rank: int) -> bytes:
        _ = self.values  # before: those of a run that has ended are all there
        return self._once("metrics", rank, lambda: metrics_lines(self.folder, rank, last_bytes=self.last_bytes))

    def log(self, rank: int, *, size: int = LOG_BYTES) -> str:
        """Return the last `size` bytes that a rank has written, from the start of a line; empty if there are none."""
        _ = self.exit_code
        text = self._once("log", rank, lambda: last_log_lines(self.folder, rank, size=LOG_BYTES))
        return newest_lines(text, size)

    def _once(self, kind: str, rank: int, read: Callable[[], T]) -> T:
        if (kind, rank) not in self._of_ranks:
            self._of_ranks[kind, rank] = read()
        value: T = self._of_ranks[kind, rank]
        return value


def look_at(run: PathLike | Snapshot) -> Snapshot:
    """Return a look at a run: a new one at a folder, or the one that is given."""
    return run if isinstance(run, Snapshot) else Snapshot(run)
