"""Make the recording of a run that has ended, from its folder: the rows that its processes wrote, by their times.

| moment | where it stands |
|---|---|
| states, the pretraining, starts, stages and ends of ranks, events | events.jsonl (history.py) |
| a step of a rank | its row of metrics |
| the last heartbeat of a rank, at which one hangs | logs/rank<N>.beat |
| a line of a log | nowhere: at the event with its text, else at its `step N`; others at the next such line |

A folder may be somebody else's: it is read as data, and no link in it is followed out of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....params import ParamError
from ..files.folder import (
    MAX_METRICS_BYTES,
    METRIC_TYPES,
    GrowingFile,
    Row,
    is_inside,
    log_paths,
    metrics_path,
    of_types,
    parse_rows,
    read_heartbeat,
    read_json,
    read_params_yaml,
    read_result,
)
from ..files.history import BACKBONES, BEAT, EVENT, RANK, STATE, Happened, read_moments
from ..files.run_record import (
    RunRecord,
    RunState,
    Status,
    all_done,
    because,
    first_failure,
    rank_statuses,
    state_of_values,
    status_values,
    values_of_state,
)
from ..launchers.registry import launcher_named
from ..slurm.job_id import job_words
from ..slurm.slurm_state import job_number
from ..watch import clean, visible
from .recording import AGAIN, LOG, MAX_RANKS, RESULT, ROW, Recording, checked, finite, run_of, thinned

TAIL_BYTES, MAX_LOG_BYTES = 1 << 20, 1 << 24
"""Bytes that are read from the end of a log, and of all logs; from the start a quarter of that. What is between is left
out."""
MAX_ROWS, MIN_ROWS = 20_000, 200
"""Rows of metrics of all ranks that are kept, and of each rank at least; of more, every k-th."""
MAX_MOMENTS = 5000
"""Moments of a rank, and events of the run, that are kept; of more, every k-th."""


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
    created = finite(record.created)
    past = _past(folder, record)
    seconds = max(0.0, *(finite(moment.time) - created for moment in past))
    moments = []
    for at, kind, rank, value in past:
        moment = checked(min(max(0.0, finite(at) - created), seconds), kind, rank, value, ranks=record.ranks)
        if moment is not None:
            moments.append(moment)
    moments.sort(key=lambda moment: moment.at)
    return Recording(
        about=f"{record.ranks} ranks, {record.device}, started by {record.executor}",
        created=created,
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


def _past(folder: Path, record: RunRecord) -> list[Happened]:
    """Return all that happened in a run; moments of one time in the order of their causes, the final state last."""
    created, values = finite(record.created), status_values(folder)
    moments: list[Happened] = []
    rows: list[list[Happened]] = []
    for rank in range(record.ranks):
        # What a run was before it was resumed is not of the launch that is recorded; its metrics and events are kept.
        of_rank = [moment for moment in read_moments(folder, rank) if moment.kind == EVENT or moment.time >= created]
        moments += thinned(of_rank, MAX_MOMENTS)
        rows.append(_rows(folder, rank, most=max(MIN_ROWS, MAX_ROWS // record.ranks)))
    moments.sort(key=lambda moment: moment.time)
    past = [*_states(folder, record, moments, submitted=finite(values.get("submitted", 0.0)))]
    past += [moment for moment in moments if moment.kind in (BACKBONES, BEAT)]
    for rank in range(record.ranks):
        past += rows[rank]
        beat = read_heartbeat(folder, rank)
        if beat and beat[0] and math.isfinite(beat[1]):
            past.append(Happened(beat[1], BEAT, rank, beat[0]))
    past += [moment for moment in moments if moment.kind in (RANK, EVENT)]
    end = max(created, finite(values.get("finished", 0.0)), *(finite(moment.time) for moment in past))
    past += _log_lines(folder, rows[0], moments, end)
    result = read_result(folder)
    if result:
        without_pictures = {key: value for key, value in result.items() if key != "captions"}
        past.append(Happened(end, RESULT, 0, without_pictures))
    past.append(Happened(end, STATE, 0, _values(_final_state(folder, record))))
    return past


def _states(folder: Path, record: RunRecord, moments: Sequence[Happened], *, submitted: float) -> Iterator[Happened]:
    """Yield the states before the final one, and the new starts of the ranks.

    Those of a job, which its scheduler keeps, are not in its folder: its ranks tell.
    """
    is_job = not launcher_named(record.executor).has_supervisor
    number = job_number(folder)
    job = job_words(number) if number else "job"
    yield Happened(
        finite(record.created), STATE, 0, _values(because(Status.QUEUED, "being submitted" if is_job else ""))
    )
    if is_job:
        yield Happened(submitted, STATE, 0, _values(because(Status.QUEUED, f"{job} was submitted")))
    running: set[int] = set()
    preempted: set[int] = set()
    for moment in moments:
        value = moment.value if isinstance(moment.value, dict) else {}
        if moment.kind == STATE and not _state_of(value).done:
            yield moment
        starts = _is_start(moment)
        # A fork reports its start after the process that it is a fork of has imported.
        if (moment.kind == BEAT and moment.rank in preempted) or (starts and moment.rank in running | preempted):
            yield moment._replace(kind=AGAIN, rank=0, value={})
            running.clear()
            preempted.clear()
        if starts:
            if is_job and not running:
                yield moment._replace(kind=STATE, rank=0, value=_values(because(Status.STARTING, job)))
            running.add(moment.rank)
        elif moment.kind == RANK and value.get("state") == "preempted":
            preempted.add(moment.rank)
            if is_job and moment.rank == 0:
                words = f"{job}: preempted; requeued"
                yield moment._replace(kind=STATE, value=_values(because(Status.QUEUED, words)))


def _is_start(moment: Happened) -> bool:
    """Return True for the report of a rank that it has started."""
    return moment.kind == RANK and isinstance(moment.value, dict) and moment.value.get("state") == "running"


def _state_of(value: Row) -> RunState:
    return state_of_values(of_types(value, {"status": str, "others": list}))


def _values(state: RunState) -> Mapping[str, Any]:
    """Return what a moment holds of a state."""
    return {key: value for key, value in values_of_state(state).items() if value not in (None, "", [])}


def _final_state(folder: Path, record: RunRecord) -> RunState:
    """Return the state that a run ended in, by its files alone."""
    state = state_of_values(status_values(folder))
    if state.done:
        return state
    statuses = rank_statuses(folder, record)
    if all_done(statuses):
        return RunState(Status.COMPLETED)
    return first_failure(statuses) or because(Status.LOST, "the recorded run left no result")


def _rows(folder: Path, rank: int, *, most: int) -> list[Happened]:
    """Return about so many rows of a rank's metrics, in order of time; rows that are left out are not parsed."""
    lines = GrowingFile(metrics_path(folder, rank)).read(MAX_METRICS_BYTES, newest=True).splitlines()
    moments = []
    for row in parse_rows(b"\n".join(thinned(lines, most))):
        row = of_types(row, METRIC_TYPES)
        at = row.pop("time", math.nan)
        if "step" in row and math.isfinite(at):
            moments.append(Happened(at, ROW, rank, row))
    return sorted(moments, key=lambda moment: moment.time)


def _log_lines(folder: Path, rows: Sequence[Happened], moments: Sequence[Happened], end: float) -> Iterator[Happened]:
    """Yield the lines of all logs, each when it can have been printed at the earliest or later.

    rows: those of rank 0.
    """
    steps = {row.value["step"]: row.time for row in reversed(rows)}
    texts = {moment.value.get("text"): moment.time for moment in moments if moment.kind == EVENT}
    ends = {}
    for moment in moments:
        if moment.kind == RANK:
            ends[moment.rank] = end if _is_start(moment) else moment.time
    logs = log_paths(folder)
    lines: dict[int, list[str]] = {}
    for rank, path in logs:
        lines.setdefault(rank, []).extend(_lines(path, min(TAIL_BYTES, MAX_LOG_BYTES // len(logs))))
    for rank in sorted(lines):
        at, timed = ends.get(rank, end), []
        for line in reversed(lines[rank]):
            step = re.search(r"\bstep (\d+)\b", line)
            anchor = texts.get(line, steps.get(int(step[1])) if step and len(step[1]) < 18 else None)
            at = min(at, anchor if anchor is not None else at)
            timed.append(Happened(at, LOG, rank, line))
        yield from reversed(timed)


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
