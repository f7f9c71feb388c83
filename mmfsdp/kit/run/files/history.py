"""The history of a run: moments that its processes append to events.jsonl, with their times, while it goes on.

| kind | who writes it | its value |
|---|---|---|
| state | whoever writes another state into status.json | the state, as there |
| backbones | the process that pretrains the backbones | how far it is: a row for each tenth |
| rank | a rank, at its start and its end | its report, as in logs/rank<N>.json |
| beat | a rank, at each stage that it enters (stages.py) | its heartbeat |

Events for people (`add_event` in folder.py) stand in the same file. Each rank but 0 has a file of its own, as for its
metrics: on a network disk, appends of several machines to one file may overwrite each other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .folder import (
    EVENT_KINDS,
    EVENT_TYPES,
    MAX_FILE_BYTES,
    NUMBER,
    GrowingFile,
    PathLike,
    Types,
    of_types,
    open_own,
    parse_rows,
)
from .stages import progress_of, stage_of

STATE, BACKBONES, RANK, BEAT, EVENT = "state", "backbones", "rank", "beat", "event"
MOMENT_TYPES: Types = {"time": NUMBER, "kind": str}


class Happened(NamedTuple):
    """A moment of a run."""

    time: float
    """Unix seconds, by the clock of the machine that wrote it."""
    kind: str
    rank: int
    """0 where the kind has no rank."""
    value: Any
    """Data from a file: its reader checks the types in it."""


def events_path(folder: PathLike, rank: int = 0) -> Path:
    """Return the path of a rank's moments; of rank 0 that of the events of the run."""
    return Path(folder) / (f"events-rank{rank}.jsonl" if rank else "events.jsonl")


def add_moment(folder: PathLike, kind: str, value: Any, *, rank: int = 0) -> None:
    """Append a moment that is now, in one system call."""
    row = json.dumps({"time": time.time(), "kind": kind, "value": value})
    with open_own(events_path(folder, rank), "ab") as file:
        file.write(row.encode() + b"\n")


def read_moments(folder: PathLike, rank: int = 0) -> list[Happened]:
    """Return the moments of a rank, and of rank 0 also those of the run and its events, in order of time."""
    moments = []
    for row in parse_rows(GrowingFile(events_path(folder, rank)).read(MAX_FILE_BYTES, newest=True)):
        row = of_types(row, MOMENT_TYPES)
        kind = row.get("kind")
        if not math.isfinite(row.get("time", math.nan)):
            continue
        if kind in EVENT_KINDS and not rank:
            moments.append(Happened(row["time"], EVENT, 0, {"text": "", **of_types(row, EVENT_TYPES)}))
        elif kind in (RANK, BEAT) or (kind in (STATE, BACKBONES) and not rank):
            moments.append(Happened(row["time"], kind, rank, row.get("value")))
    return sorted(moments, key=lambda moment: moment.time)


def stage_seconds(moments: Sequence[Happened]) -> list[tuple[str, float]]:
    """Return the words of the stages of a rank since it was last started, with the seconds in each, in order.

    moments: those of the rank. The last stage counts if the rank has reported its end.
    """
    entered: list[tuple[str, float]] = []  # activity and time
    end: float | None = None
    for moment in moments:
        if moment.kind == RANK and isinstance(moment.value, dict) and moment.value.get("state") != "running":
            end = moment.time
        elif moment.kind == BEAT and isinstance(moment.value, str):
            is_again = end is not None or (entered and progress_of(moment.value) < progress_of(entered[-1][0]))
            if is_again:
                entered, end = [], None
            entered.append((moment.value, moment.time))
    ends = [since for _, since in entered[1:]]
    if end is not None:
        ends.append(end)
    stages = zip(entered, ends, strict=False)  # the last one goes on, or was killed
    return [(stage_of(activity).words, until - since) for (activity, since), until in stages]
