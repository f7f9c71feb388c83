"""Make the recording of a run that has ended, from its folder: what happened when, by the times that the files hold.

| moment | its time |
|---|---|
| the launch, the submission, the end | run.json and status.json |
| a step of a rank | `time` of its row of metrics |
| preempted, requeued, resumed, saved | the events; they also part the lives of the ranks |
| the end of a rank, and its last heartbeat | logs/rank<N>.json and .beat |
| a line of a log | that of the event with its text, else of its `step N`; of others, that of the next such line |
| what a rank did before its first step | not in the files: the stages share the time before that step |

A folder may be somebody else's: it is read as data, and no link in it is followed out of it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ..params import ParamError
from .folder import (
    MAX_METRICS_BYTES,
    METRIC_TYPES,
    GrowingFile,
    Row,
    is_inside,
    log_paths,
    metrics_path,
    of_types,
    parse_rows,
    read_events,
    read_heartbeat,
    read_json,
    read_params_yaml,
    read_result,
)
from .launchers.registry import launcher_named
from .pretraining import backbones_progress
from .record import (
    RunRecord,
    RunState,
    Status,
    all_done,
    because,
    first_failure,
    rank_statuses,
    read_status,
    status_values,
    values_of_state,
)
from .recording import (
    AGAIN,
    BACKBONES,
    BEAT,
    EVENT,
    LOG,
    MAX_RANKS,
    RANK,
    RESULT,
    ROW,
    STATE,
    Recording,
    checked,
    finite,
    run_of,
    thinned,
)
from .slurm_state import job_number
from .stages import stage_of
from .watch import clean, visible

STARTUP = {
    "importing": 0.0,
    "joining": 0.6,
    "building": 0.62,
    "opening the data": 0.79,
    "planning": 0.8,
    "wrapping": 0.94,
    "taking up": 0.99,
}
"""A rank's report before its first step -> the share of the time before it; measured in a run of preset tiny."""
MIN_WAIT_SHARE = 0.1
"""Share of the time from the submission to the first step that a requeued job waited for its first start, at least."""
TAIL_BYTES, MAX_LOG_BYTES = 1 << 20, 1 << 24
"""Bytes that are read from the end of a log, and of all logs; from the start a quarter of that. What is between is left
out."""
MAX_ROWS, MIN_ROWS = 20_000, 200
"""Rows of metrics of all ranks that are kept, and of each rank at least; of more, every k-th."""
MAX_EVENTS, MAX_LIVES = 5000, 100
PRETRAIN_PARTS = 10
"""Moments at which a recording shows how far the pretraining is."""


Happened = tuple[float, str, int, Any]
"""(unix seconds, kind, rank, value): a moment before it is checked."""


class Life(NamedTuple):
    """The time from a start of the ranks to their end, in unix seconds."""

    start: float
    end: float
    preempted: bool
    """It ended by a preemption, and another one follows."""


def recording_of(folder: Path) -> Recording:
    """Return the recording of the run in a folder. Raises ParamError where there is none, or it cannot be played."""
    _check_links(folder)
    record = RunRecord.read(folder)
    if record is None:
        raise ParamError("recording", f"{str(folder)!r} is not the folder of a run")
    if not launcher_named(record.executor).has_ranks:
        words = "is a replay; play its recording again"
        raise ParamError("recording", f"{str(folder)!r} {words}")
    run = run_of(asdict(record))
    if run is None:
        words = f"has {record.ranks} ranks; a recording of at most {MAX_RANKS} can be played"
        raise ParamError("recording", f"{str(folder)!r} {words}")
    history = _History(folder, record)
    moments = []
    for at, kind, rank, value in history.moments():
        seconds = min(max(0.0, finite(at) - history.created), history.seconds)
        moment = checked(seconds, kind, rank, value, ranks=record.ranks)
        if moment is not None:
            moments.append(moment)
    moments.sort(key=lambda moment: moment.at)
    return Recording(
        about=f"{record.ranks} ranks, {record.device}, started by {record.executor}",
        created=history.created,
        run=run,
        params=_params(folder),
        plan=read_json(folder / "plan.json") or {},
        moments=moments,
    )


def _params(folder: Path) -> Row:
    """Return what params.yaml holds. Raises ParamError."""
    try:
        return read_params_yaml(folder)
    except FileNotFoundError:
        raise ParamError("recording", f"{str(folder)!r} has no params.yaml") from None


def _check_links(folder: Path) -> None:
    """Raise ParamError for a link out of the folder: a replay would show a file of whoever plays it."""
    for path in (folder / "logs", *folder.glob("*"), *folder.glob("logs/*")):
        if path.is_symlink() and not (is_inside(path, folder) and path.exists()):
            raise ParamError("recording", f"{str(path)!r} is a link out of the folder, or to nothing; remove it")


class _History:
    """Tell a run's past from the files of its folder."""

    def __init__(self, folder: Path, record: RunRecord):
        self.folder, self.record = folder, record
        self.created = finite(record.created)
        most_rows = max(MIN_ROWS, MAX_ROWS // record.ranks)
        self.rows = [_in_order(_read_rows(folder, rank, most_rows)) for rank in range(record.ranks)]
        events = [event for event in read_events(folder) if math.isfinite(event.get("time", math.nan))]
        self.events = thinned(events, MAX_EVENTS)
        self.logs = log_paths(folder)
        self.log_tail_bytes = min(TAIL_BYTES, MAX_LOG_BYTES // max(1, len(self.logs)))
        self.statuses = rank_statuses(folder, record)
        self.final = _final_state(folder, self.statuses)
        values = status_values(folder)
        self.submitted = finite(values.get("submitted", 0.0)) or self.created
        times = [row["time"] for rows in self.rows for row in rows[-1:]]
        times += [event["time"] for event in self.events]
        times += [status.get("time", 0.0) for status in self.statuses]
        self.end = max(map(finite, [self.created, self.submitted, values.get("finished", 0.0), *times]))
        self.lives = self._lives()

    @property
    def seconds(self) -> float:
        """Return how long the run took."""
        return self.end - self.created

    def moments(self) -> Iterator[Happened]:
        """Yield (unix seconds, kind, rank, value) of all moments; at equal times in the order of their causes."""
        yield from self._states()
        for rank in range(self.record.ranks):
            for number, life in enumerate(self.lives):
                yield from self._life_of(rank, life, is_last=number == len(self.lives) - 1)
        for event in self.events:
            yield event["time"], EVENT, 0, event
        for rank in range(self.record.ranks):
            yield from self._log_of(rank)
        result = read_result(self.folder)
        if result:
            done = [status["time"] for status in self.statuses if "time" in status]
            without_pictures = {key: value for key, value in result.items() if key != "captions"}
            yield min([*done, self.end]), RESULT, 0, without_pictures
        yield self.end, STATE, 0, _state(self.final)

    # The run

    def _lives(self) -> list[Life]:
        """Return the lives of the ranks, parted where they were requeued."""
        times = [row["time"] for row in self.rows[0]]
        again = sorted(event["time"] for event in self.events if event["kind"] == "requeued")[-MAX_LIVES:]
        ends = []
        for start in again:
            preempted = [e["time"] for e in self.events if e["kind"] == "preempted" and e["time"] <= start]
            last = times[: bisect_left(times, start)][-1:]
            ends.append(max([*preempted[-1:], *last, self.submitted]))
        starts = [self._first_start(again, times), *again]
        lives = [Life(start, end, True) for start, end in zip(starts, ends, strict=False)]
        return [*lives, Life(starts[-1], self.end, False)]

    def _first_start(self, again: list[float], times: list[float]) -> float:
        """Return when the ranks were started first. Their reports are of the last life; of a requeued run, estimate."""
        if not again:
            return min([finite(s["start"]) for s in self.statuses if s.get("start")] or [self.submitted])
        later = [time for time in times if time > again[-1]]
        startup_s = later[0] - again[-1] if later else 0.0
        if not times:
            return self.submitted
        earliest = self.submitted + MIN_WAIT_SHARE * (times[0] - self.submitted)
        return max(earliest, times[0] - startup_s)

    def _states(self) -> Iterator[Happened]:
        """Yield the states before the final one, and the new starts of the ranks."""
        is_job = not launcher_named(self.record.executor).has_supervisor
        job = f"job {job_number(self.folder) or ''}".strip() if is_job else ""
        start = self.lives[0].start
        prepared = self.submitted if is_job else start
        yield self.created, STATE, 0, _state(because(Status.QUEUED, "being submitted" if is_job else ""))
        if self.record.pretrains:
            yield self.created, STATE, 0, _state(RunState(Status.PREPARING))
            label = backbones_progress(self.folder).label or "backbones"
            for part in range(PRETRAIN_PARTS):
                share = part / PRETRAIN_PARTS
                passed = share * (prepared - self.created)
                value = {"label": label, "share": share, "left_s": prepared - self.created - passed}
                yield self.created + passed, BACKBONES, 0, value
        if is_job:
            yield self.submitted, STATE, 0, _state(because(Status.QUEUED, f"{job} was submitted"))
        for number, life in enumerate(self.lives):
            if number:
                yield life.start, AGAIN, 0, {}
            done = any(row["time"] <= life.start for row in self.rows[0])
            yield life.start, STATE, 0, _state(because(Status.RUNNING if done else Status.STARTING, job))
            first = [row["time"] for row in self.rows[0] if row["time"] > life.start][:1]
            if first and not done:
                yield first[0], STATE, 0, _state(because(Status.RUNNING, job))
            if life.preempted and is_job:
                yield life.end, STATE, 0, _state(because(Status.QUEUED, f"{job}: preempted; requeued"))

    # One rank

    def _life_of(self, rank: int, life: Life, *, is_last: bool) -> Iterator[Happened]:
        """Yield the reports, the heartbeats and the metrics of a rank in one of its lives."""
        host = {key: value for key, value in self.statuses[rank].items() if key == "host"}
        yield life.start, RANK, rank, host | {"state": "running"}
        rows = [row for row in self.rows[rank] if life.start < row["time"] <= life.end]
        beat = read_heartbeat(self.folder, rank) if is_last else None
        first = finite(rows[0]["time"] - rows[0].get("step_s", 0.0)) if rows else beat[1] if beat else life.end
        yield from self._startup(rank, life.start, first, last_words="" if rows or not beat else beat[0])
        before, step = first, rows[0]["step"] - 1 if rows else 0
        for row in rows:
            if row["step"] > step + 1:  # rows between were left out
                before = max(before, row["time"] - max(0.0, finite(row.get("step_s", 0.0))))
            step = row["step"]
            yield before, BEAT, rank, f"step {step} data"
            yield min(before + max(0.0, row.get("data_s", 0.0)), row["time"]), BEAT, rank, f"step {step} compute"
            yield row["time"], ROW, rank, {key: value for key, value in row.items() if key != "time"}
            before = row["time"]
        if beat and beat[0]:
            yield min(max(before, beat[1]), life.end), BEAT, rank, beat[0]
        status = self.statuses[rank]
        if not is_last:
            words = {"state": "preempted", "step": rows[-1]["step"] if rows else 0} if life.preempted else {}
            yield life.end, RANK, rank, host | words
        elif status.get("state") in ("done", "failed", "preempted"):
            yield min(status.get("time", life.end), life.end), RANK, rank, status

    def _startup(self, rank: int, start: float, end: float, *, last_words: str) -> Iterator[Happened]:
        """Yield the stages before the first step; of a rank that did none, those before the one of its last report."""
        last = stage_of(last_words) if last_words else None
        whole = next((share for stage, share in STARTUP.items() if stage_of(stage) == last), 1.0)
        for stage, share in STARTUP.items():
            if share < whole or not share:
                yield start + (end - start) * share / (whole or 1.0), BEAT, rank, stage

    def _log_of(self, rank: int) -> Iterator[Happened]:
        """Yield the lines of a rank's logs, each when it can have been printed at the earliest or later."""
        lines: list[str] = []
        for number, path in self.logs:
            if number == rank:
                lines += _lines(path, self.log_tail_bytes)
        steps = {row["step"]: row["time"] for row in reversed(self.rows[0])}
        texts = {event["text"]: event["time"] for event in self.events}
        status = self.statuses[rank]
        at = status["time"] if status.get("state") in ("done", "failed") and "time" in status else self.end
        timed = []
        for line in reversed(lines):
            step = re.search(r"\bstep (\d+)\b", line)
            anchor = texts.get(line, steps.get(int(step[1])) if step and len(step[1]) < 18 else None)
            at = min(at, anchor if anchor is not None else at)
            timed.append((at, LOG, rank, line))
        yield from reversed(timed)


def _read_rows(folder: Path, rank: int, most: int) -> list[Row]:
    """Return at most about so many rows of a rank's metrics; rows that are left out are not parsed."""
    lines = GrowingFile(metrics_path(folder, rank)).read(MAX_METRICS_BYTES, newest=True).splitlines()
    return [of_types(row, METRIC_TYPES) for row in parse_rows(b"\n".join(thinned(lines, most)))]


def _in_order(rows: list[Row]) -> list[Row]:
    """Return the rows that have a step and a time, in order of time."""
    kept = [row for row in rows if "step" in row and math.isfinite(row.get("time", math.nan))]
    return sorted(kept, key=lambda row: row["time"])


def _final_state(folder: Path, statuses: list[dict[str, Any]]) -> RunState:
    """Return the state that a run ended in, by its files alone."""
    state = read_status(folder)
    if state.done:
        return state
    if all_done(statuses):
        return RunState(Status.COMPLETED)
    return first_failure(statuses) or because(Status.LOST, "the recorded run left no result")


def _state(state: RunState) -> Mapping[str, Any]:
    """Return what a moment holds of a state."""
    return {key: value for key, value in values_of_state(state).items() if value not in (None, "", [])}


def _lines(path: Path, tail_bytes: int) -> Iterator[str]:
    """Yield the lines of a log as a terminal shows them; of a long one, those at its start and at its end."""
    log = GrowingFile(path)
    data = log.read(tail_bytes // 4)
    rest = log.read(tail_bytes, newest=True)
    if log.skipped:
        data += f"\n[... {log.skipped:,} bytes not recorded ...]\n".encode()
    for line in (data + rest).split(b"\n"):
        if line:
            yield clean(visible(line))
