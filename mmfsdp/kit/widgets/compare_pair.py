"""Two runs side by side: the parameters that differ, what each sends, holds and takes, and both pictures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from ...core.plan import WrapPlan
from ...params import TrainParams
from ...params.base import leaves
from ...params.in_words import size
from ...predict.timeline import Timeline, step_timeline
from ..run.files.folder import read_json, read_metrics
from .charts.charts_page import run_names
from .markup import shown, table_of_cells
from .pictures.plan_pictures import plan_pictures
from .pictures.step_picture import most_drawn
from .plan_figures import Figure
from .report import read_params
from .report_plan import STEP_FIELDS

NAMES_ONLY = ("launch.name", "launch.folder", "launch.replace")
"""Parameters that say where a run lies, not what it does."""
PAIR_WIDTH = 530
"""Pixels of each of two pictures side by side; on a narrow page they stand one below the other."""


def pair_html(first: Path, second: Path) -> str:
    """Return what differs between two runs, the second with its change since the first, as HTML."""
    params = [read_params(path) for path in (first, second)]
    plans = [_plan_of(path) for path in (first, second)]
    names = run_names([first, second])
    head = [""] + [shown(name) for name in names] + ["change"]
    lines = [_cells(name, _words(values[0]), _words(values[1]), "") for name, values in _differences(*params).items()]
    for name, (before, after) in _figures((first, second), plans).items():
        lines.append(_figure_cells(name, before, after))
    html = table_of_cells(head, lines, label="two runs compared", look="mm-table mm-pair-table")
    drawn = []
    for name, plan, values in zip(names, plans, params, strict=True):
        if plan is not None:
            drawn.append((name, plan, _timeline_of(plan, values)))
    scale = max((most_drawn(timeline, activations=False) for _, _, timeline in drawn if timeline), default=0)
    pictures = ""
    for name, plan, timeline in drawn:
        picture = plan_pictures(plan, timeline, width=PAIR_WIDTH, scale_to=scale)
        pictures += f"<div><h4>{shown(name)}</h4>{picture}</div>"
    return f'{html}<div class="mm-pair">{pictures}</div>'


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each parameter that differs, by its dotted name."""
    first, second = leaves(dict(before)), leaves(dict(after))
    names = [name for name in (*first, *(name for name in second if name not in first)) if name not in NAMES_ONLY]
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _figures(paths: tuple[Path, Path], plans: list[WrapPlan | None]) -> dict[str, tuple[float | None, float | None]]:
    """Return both values of what is compared, measured where there are steps; None where nobody knows."""
    values: dict[str, list[float | None]] = {}
    for path, plan in zip(paths, plans, strict=True):
        rows = read_metrics(path)
        newest = rows[-1] if rows else {}
        seconds = [row["step_s"] for row in rows if "step_s" in row]
        found = {
            "sent a step": newest.get("wire_bytes"),
            "weights at rest": plan.bytes_at_rest if plan else None,
            "peak memory": newest.get("memory_bytes"),
            "seconds a step": median(seconds) if seconds else None,
        }
        for name, value in found.items():
            values.setdefault(name, []).append(value)
    return {name: (before, after) for name, (before, after) in values.items()}


def _figure_cells(name: str, before: float | None, after: float | None) -> str:
    write = _seconds if name.startswith("seconds") else size
    change = ""
    if before is not None and after is not None:
        figure = Figure(after, name, before)
        change = f'<span class="mm-{figure.kind}">{escape(figure.change)}</span>'
    words = ["–" if value is None else write(value) for value in (before, after)]
    return _cells(name, words[0], words[1], change)


def _cells(name: str, first: str, second: str, change: str) -> str:
    return f"<td><b>{escape(name)}</b></td><td>{escape(first)}</td><td>{escape(second)}</td><td>{change}</td>"


def _words(value: Any) -> str:
    return "unset" if value is None else str(value)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _plan_of(path: Path) -> WrapPlan | None:
    """Return the plan of a run; None where it has none, or a damaged one."""
    try:
        return WrapPlan.from_dict((read_json(path / "plan.json") or {})["plan"])
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _timeline_of(plan: WrapPlan, params: Mapping[str, Any]) -> Timeline | None:
    values = params.get("train") or {}
    train = TrainParams.from_dict({name: values[name] for name in STEP_FIELDS if name in values})
    sources = 1 + len((params.get("data") or {}).get("more") or ())
    return step_timeline(plan, train, sources=sources)
