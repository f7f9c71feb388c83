"""A recording of a run: what its folder held at each moment, in one file without weights that can be played again.

The first line of the file is a header: what the recording shows, who ran it, its parameters and its plan. Each other
line is a moment, `[seconds since the launch, kind, rank, value]`. A recording may come from somebody else, so it is
data: it names no file to read or write, nothing in it is imported, and what is not of the expected type is left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ....params import ParamError
from ....params.base import did_you_mean, without_controls
from ....params.in_words import size
from ..files.folder import (
    EVENT_KINDS,
    EVENT_TYPES,
    HEARTBEAT_BYTES,
    METRIC_TYPES,
    NO_FILE,
    NUMBER,
    RESULT_TYPES,
    PathLike,
    Row,
    Types,
    of_types,
    parse_rows,
    read_file,
    write_text,
)
from ..files.history import BACKBONES, BEAT, EVENT, RANK, STATE
from ..files.run_record import ENTRIES, RANK_TYPES, STATE_KEYS, STATUS_TYPES, TRAIN, RunRecord, Status
from ..launchers.registry import launcher_named
from ..pretraining import TYPES as BACKBONES_TYPES

T = TypeVar("T")

SUFFIX = ".jsonl"
FORMAT = 1
MAX_RANKS = 1024
"""Ranks of a recording that is played: each has a file that is written several times a second."""
MAX_SECONDS = 366 * 86_400.0
MAX_LINE = 4000
"""Characters of a line of a log."""
MAX_ABOUT = 300
"""Characters of what a recording was made on."""
MAX_BYTES, MAX_MOMENTS = 1 << 27, 1_000_000
"""Limits of a recording, above what `mmfsdp record` writes for MAX_RANKS ranks."""

AGAIN, ROW, LOG, RESULT = "again", "row", "log", "result"
KINDS = (STATE, AGAIN, BACKBONES, RANK, BEAT, ROW, EVENT, LOG, RESULT)
"""Kinds of moments: a state of the run; its ranks are started again; the pretraining of its backbones; a report and a
heartbeat of a rank; a row of metrics; an event; a line of a rank's log; the result."""

HEADER_TYPES: Types = {"format": int, "about": str, "created": NUMBER, "run": dict, "params": dict, "plan": dict}
VALUE_TYPES: dict[str, Types] = {
    STATE: {key: STATUS_TYPES[key] for key in STATE_KEYS},
    BACKBONES: {key: BACKBONES_TYPES[key] for key in ("label", "share", "left_s")},
    RANK: {key: RANK_TYPES[key] for key in ("state", "host", "step", "error", "kind", "traceback")},
    ROW: METRIC_TYPES,
    EVENT: {key: EVENT_TYPES[key] for key in ("step", "kind", "text")},
    RESULT: RESULT_TYPES,
}
OPEN_ENDED = (ROW, RESULT)
"""Kinds whose values may have further keys, such as scores of a person's own."""


class Moment(NamedTuple):
    """Name what changed in a run at one moment."""

    at: float
    """Seconds since the launch."""
    kind: str
    rank: int
    """0 where the kind has no rank."""
    value: Any
    """A mapping; of a heartbeat and of a line, a text."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Hold what a recorded run was, and what happened when."""

    about: str
    """The machines that it was recorded on, such as `2 nodes of a Slurm cluster, 4 ranks on CPUs, gloo`."""
    created: float
    """The time when the recorded run was launched, in unix seconds."""
    run: RunRecord
    """The record of the run: its content of run.json, without a process, a host or a digest."""
    params: Row
    """All parameters, as in params.yaml."""
    plan: Row
    """The content of plan.json; empty without a plan."""
    moments: list[Moment]
    """The moments of the recording, in order of time."""

    @property
    def seconds(self) -> float:
        """Return how long the recorded run took."""
        return self.moments[-1].at if self.moments else 0.0

    def write(self, path: PathLike) -> None:
        """Write it into a file."""
        run = {key: getattr(self.run, key) for key in RUN_KEYS}
        header = {"format": FORMAT, "about": self.about, "created": self.created, "run": run}
        lines = [json.dumps(header | {"params": self.params, "plan": self.plan})]
        lines += [json.dumps([round(moment.at, 3), *moment[1:]]) for moment in self.moments]
        write_text(path, "\n".join(lines) + "\n")

    @classmethod
    def read(cls, path: PathLike) -> Recording:
        """Return the recording in a file. Raises ParamError where there is none that can be played."""
        header, lines = _read_lines(path)
        values = of_types(next(iter(parse_rows(header)), {}), HEADER_TYPES)
        run = run_of(values.get("run", {}))
        if "format" in values and values["format"] != FORMAT:
            words = f"{str(path)!r} has format {values['format']}, and this version of mmfsdp reads {FORMAT}"
            raise ParamError("recording", f"{words}; play it with the version that made it{_version_words(run)}")
        if "format" not in values or run is None or "params" not in values:
            raise ParamError("recording", f"{str(path)!r} is not a recording that this version of mmfsdp can read")
        moments = sorted(_moments(lines, run.ranks), key=lambda moment: moment.at)
        created = finite(values.get("created", 0.0))
        about = values.get("about", "") or "it does not say what it was made on"
        return cls(
            about=about[:MAX_ABOUT],
            created=created,
            run=run,
            params=values["params"],
            plan=values.get("plan", {}),
            moments=moments,
        )


def _read_lines(path: PathLike) -> tuple[bytes, list[bytes]]:
    """Return the header and the other lines of a recording. Raises ParamError for what is none."""
    try:
        data = read_file(path, limit=MAX_BYTES + 1)
    except NO_FILE:
        words = "is no file" if os.path.exists(path) else "does not exist"
        raise ParamError("recording", f"{str(path)!r} {words}") from None
    if len(data) > MAX_BYTES or data.count(b"\n") > MAX_MOMENTS:
        words = f"is too large: at most {size(MAX_BYTES)} and {MAX_MOMENTS:,} lines can be played"
        raise ParamError("recording", f"{str(path)!r} {words}")
    header, *lines = data.split(b"\n")
    return header, lines


def _version_words(run: RunRecord | None) -> str:
    return f", {run.version[:40]}" if run is not None and run.version else ""


_RUN = "executor entry ranks steps threads timeout_min device version hang_timeout_s pretrains"
RUN_KEYS = tuple(_RUN.split())
"""Keys of run.json that a recording keeps."""
NOWHERE: Row = {"host": "recording", "pid": 1, "start": 0.0, "identity": "", "created": 0.0}
"""In place of what names a process: no machine has this name, so nobody looks for the process."""


def run_of(values: Mapping[str, Any]) -> RunRecord | None:
    """Return who ran a recorded run; None for what is no run that can be played."""
    known = {key: values[key] for key in RUN_KEYS if key in values}
    run = RunRecord.of_values(known | NOWHERE)
    if run is None or run.ranks > MAX_RANKS or not launcher_named(run.executor).has_ranks:
        return None
    return run if run.entry in ENTRIES else RunRecord.of_values(known | NOWHERE | {"entry": TRAIN})


def thinned(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most about so many of these items: those at both ends, and every k-th of the others."""
    if len(items) <= most:
        return items
    ends = most // 4
    between = items[ends:-ends]
    stride = math.ceil(len(between) / (most - 2 * ends))
    return [*items[:ends], *between[::stride], *items[-ends:]]


def finite(number: float) -> float:
    """Return a number that can be a time, 0 for any other."""
    return float(number) if abs(number) < 1e12 else 0.0


def _moments(lines: list[bytes], ranks: int) -> Iterator[Moment]:
    """Yield the moments in the lines of a file; what is none is left out."""
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, list) and len(values) == 4:
            moment = checked(*values, ranks=ranks)
            if moment is not None:
                yield moment


def checked(at: Any, kind: Any, rank: Any, value: Any, *, ranks: int) -> Moment | None:
    """Return a moment as a player may write it, None for what is none."""
    is_time = type(at) in (int, float) and 0 <= at < MAX_SECONDS  # also false for nan
    if not is_time or kind not in KINDS or type(rank) is not int or not 0 <= rank < ranks:
        return None
    if kind in (BEAT, LOG):
        length = HEARTBEAT_BYTES if kind == BEAT else MAX_LINE
        return Moment(at, kind, rank, without_controls(value)[:length]) if isinstance(value, str) else None
    if not isinstance(value, dict):
        return None
    types = VALUE_TYPES.get(kind, {})
    value = of_types(value, types)
    if kind not in OPEN_ENDED:
        value = {key: value[key] for key in types if key in value}
    if kind == STATE and value.get("status") not in list(Status):
        return None
    if kind == EVENT and (value.get("kind") not in EVENT_KINDS or "step" not in value):
        return None
    return Moment(at, kind, rank, value)


# ---- the recordings that the package brings ----


def shipped() -> dict[str, Path]:
    """Return the recordings of this package by name."""
    folder = Path(str(resources.files(__package__) / "recordings"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find_recording(word: PathLike) -> Path:
    """Return the file or run folder that a word names: a path, or the name of a recording of this package."""
    path, ours = Path(os.path.expanduser(word)), shipped()
    if path.exists() or len(path.parts) > 1:
        return path
    if str(word) in ours:
        return ours[str(word)]
    words = f"{str(word)!r} is no run folder, no file, and none of the recordings {', '.join(ours)}"
    raise ParamError("recording", words + did_you_mean(str(word), list(ours)))
