"""Runs beside each other: in what they differ, how they went, and which was best. From their folders alone."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from .. import runs
from ..params import ParamError
from ..plots import History, Series, chart, figure
from ..plots.curves import DASHES, HELD_OUT, METRICS, Line
from ..plots.style import COLORS
from ..watch import Rows
from .html import Html, page, table
from .run import read_params

NAMES = {"launch.name", "launch.folder"}
"""Parameters in which all runs differ."""
MIB = 2**20
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a run."""

    name: str
    read: Callable[[Facts], Any]
    better: int = 0
    """1 where more is better, -1 where less is, 0 where neither."""
    form: str = "{:,.4g}"


COLUMNS = (
    Column("steps", lambda f: f["state"].step, form="{}"),
    Column("loss in the last tenth", lambda f: _end(f["history"].get("loss")), -1),
    Column("held-out loss", lambda f: getattr(f["history"].get(HELD_OUT), "newest", None), -1),
    Column("new pictures right", lambda f: f["result"].get("heldout_exact_match"), 1, "{:.1%}"),
    Column("never-seen right", lambda f: f["result"].get("unseen_combination_exact_match"), 1, "{:.1%}"),
    Column("samples/s", lambda f: f["samples_per_s"], 1, "{:,.1f}"),
    Column("MiB sent a step, predicted", lambda f: _mib(f["cost"].get("wire_bytes")), form="{:,.2f}"),
    Column("MiB sent a step, measured", lambda f: _mib(f["last"].get("wire_bytes")), -1, "{:,.2f}"),
    Column("peak MiB, predicted", lambda f: _mib(f["cost"].get("peak_bytes")), form="{:,.1f}"),
    Column("peak MiB, measured", lambda f: _mib(f["last"].get("memory_bytes")), -1, "{:,.1f}"),
)


@dataclass(frozen=True)
class Comparison:
    """Runs, in the order they were named in."""

    names: list[str]
    differing: dict[str, list[Any]]
    """By dotted name, the value of each run; None where it has no such parameter. Equal ones are left out."""
    states: list[str]
    figures: list[list[Any]]
    """By run, the value of each of COLUMNS; None where it is not known."""
    histories: list[History]

    @property
    def best(self) -> set[tuple[int, int]]:
        """(run, column) of what is best in its column, where runs differ."""
        found = set()
        for j, column in enumerate(COLUMNS):
            known = [row[j] for row in self.figures if row[j] is not None]
            if column.better and len(set(known)) > 1:
                top = max(known, key=lambda value: column.better * value)
                found |= {(i, j) for i, row in enumerate(self.figures) if row[j] == top}
        return found

    def looks(self) -> dict[str, tuple[str, str]]:
        """Color and dashes of each run's lines, by its name."""
        looks = ((COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]) for i in range(len(self.names)))
        return dict(zip(self.names, looks, strict=True))

    def csv(self) -> str:
        """All as comma-separated values, plain numbers, a line a run."""
        out = io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["run", "state", *self.differing, *(column.name for column in COLUMNS)])
        for i, name in enumerate(self.names):
            lines.writerow([name, self.states[i], *(v[i] for v in self.differing.values()), *self.figures[i]])
        return out.getvalue()

    def svg(self) -> str:
        """The curves of all runs as one figure."""
        return figure(self._charts(), names=self.looks())

    def html(self) -> str:
        """Table and curves."""
        marks = {n: f'<i class="mm-key" style="--c:{color}"></i>' for n, (color, _) in self.looks().items()}
        rows: list[list[object]] = [["state", *self.states]]
        rows += [[name, *("–" if v is None else _short(v) for v in values)] for name, values in self.differing.items()]
        for j, column in enumerate(COLUMNS):
            rows.append(
                [column.name, *(_said(column, row[j], (i, j) in self.best) for i, row in enumerate(self.figures))]
            )
        told = "only parameters that differ are shown" if self.differing else "the runs have the same parameters"
        head = [Html(""), *(Html(marks[name] + escape(name)) for name in self.names)]
        return table(head, rows) + f'<p class="mm-quiet">★ best of its line; {told}</p>' + self.svg()

    def _charts(self) -> list[str]:
        looks = self.looks()
        found = []
        for key, metric in METRICS.items():
            lines = [Line(n, h[key], *looks[n]) for n, h in zip(self.names, self.histories, strict=True) if key in h]
            if lines:
                found.append(chart(metric, lines))
        return found


def compare(folders: Sequence[str | Path]) -> Comparison:
    """Read runs to be compared. Raises ParamError for a folder that is no run."""
    paths = [Path(os.path.expanduser(folder)) for folder in folders]
    for path in paths:
        if not runs.is_run(path):
            raise ParamError("runs", f"{str(path)!r} is not a run; name folders of runs, such as runs/first")
    facts = [_facts(path) for path in paths]
    params = [fact["params"] for fact in facts]
    names = {name: None for values in params for name in values if name not in NAMES}
    differing = {name: [values.get(name) for values in params] for name in names}
    return Comparison(
        names=_names(paths),
        differing={name: values for name, values in differing.items() if any(v != values[0] for v in values)},
        states=[str(fact["state"].status) for fact in facts],
        figures=[[_number(column.read(fact)) for column in COLUMNS] for fact in facts],
        histories=[fact["history"] for fact in facts],
    )


def write_comparison(folders: Sequence[str | Path], to: str | Path) -> Path:
    """Write a page of runs compared, with everything inside it, and return its path. Raises as `compare`."""
    found = compare(folders)
    runs.write_text(to, page("Runs compared", found.html()))
    return Path(to)


def _facts(folder: Path) -> dict[str, Any]:
    reader, history, more = Rows(folder), History(), True
    last: dict[str, Any] = {}
    while more:
        rows, more = reader.poll()
        history.add(rows)
        last = rows[-1] if rows else last
    return {
        "params": _flat(read_params(folder)),
        "state": runs.run_state(folder),
        "cost": (runs.read_json(folder / "plan.json") or {}).get("estimate") or {},
        "result": runs.read_json(folder / "result.json") or {},
        "last": last,
        "samples_per_s": _usual(history.get("samples_per_s")),
        "history": history,
    }


def _usual(series: Series | None) -> float | None:
    """The median after the first tenth."""
    buckets = series.buckets if series else []
    return median(bucket.mean for bucket in buckets[len(buckets) // 10 :]) if buckets else None


def _end(series: Series | None) -> float | None:
    """The mean over the last tenth of the steps: that of a single batch says little of a run."""
    buckets = series.buckets if series else []
    end = buckets[-max(1, len(buckets) // 10) :]
    return sum(bucket.total for bucket in end) / sum(bucket.count for bucket in end) if end else None


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path before them as tells them apart."""
    depth = 1
    while len({path.absolute().parts[-depth:] for path in paths}) < len({path.absolute() for path in paths}):
        depth += 1
    return ["/".join(path.absolute().parts[-depth:]) for path in paths]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested parameters by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and bool(value)
        found |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _said(column: Column, value: Any, best: bool) -> object:
    if value is None:
        return "–"
    words = escape(column.form.format(value))
    return Html(f"<b>★ {words}</b>" if best else words)


def _short(value: Any) -> str:
    words = str(value)
    return words if len(words) <= 60 else words[:57] + "…"


def _mib(value: Any) -> float | None:
    return value / MIB if _number(value) is not None else None


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) and abs(value) < 1e300 else None
