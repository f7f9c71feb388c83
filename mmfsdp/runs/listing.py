"""All runs in some folders, at a glance."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import PathLike, last_row, read_json
from .state import RunRecord, RunState, Status, is_run, run_state

SWEEP = "sweep.json"
"""The file that makes a folder one of runs that belong together."""


@dataclass(frozen=True)
class Listed:
    """A run in a list."""

    path: Path
    name: str
    """As seen from the folder that was listed: a sweep's come with the sweep's name."""
    state: RunState
    loss: float | None
    created: float | None
    """Unix seconds; None if unknown."""
    where: str
    """Machine, or job and nodes."""


def find_runs(folder: PathLike) -> list[Listed]:
    """The runs in a folder and in the sweeps in it, oldest first; of a run's own folder, that one. Whatever else is
    there is left out, and a damaged run is listed as far as it can be read."""
    folder = Path(folder)
    paths = [(folder, folder.resolve().name)] if is_run(folder) else list(_in(folder, ""))
    found = [_listed(path, name) for path, name in paths]
    return sorted(found, key=lambda run: (run.created or 0.0, run.name))


def _in(folder: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if is_run(path):
            yield path, prefix + path.name
        elif not prefix and os.path.isfile(path / SWEEP):
            yield from _in(path, f"{path.name}/")


def _listed(path: Path, name: str) -> Listed:
    try:
        state, record, loss = run_state(path), RunRecord.read(path), last_row(path).get("loss")
        job = (read_json(path / "status.json") or {}).get("job")
    except OSError as error:
        return Listed(path, name, RunState(Status.LOST, f"cannot be read: {error}"), None, None, "")
    where = "" if record is None else record.host if record.executor == "local" else f"{record.executor} {job or ''}"
    return Listed(
        path, name, state, loss if isinstance(loss, float) else None, record.created if record else None, where
    )


def runs_table(rows: Sequence[Listed]) -> str:
    """A list of runs as text: name, state, step of steps, loss, age, where, and why it is so."""
    lines = [("name", "state", "step", "loss", "age", "where", "")]
    for run in rows:
        loss = "" if run.loss is None else f"{run.loss:.4g}"
        old = "" if run.created is None else age(time.time() - run.created)
        step = f"{run.state.step}/{run.state.steps}"
        lines.append((run.name, str(run.state.status), step, loss, old, run.where, run.state.reason[:100]))
    return text_table(lines)


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; what a terminal would obey becomes a space."""
    lines = [["".join(c if c.isprintable() else " " for c in cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def age(seconds: float) -> str:
    """In the largest whole unit: `3 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
