"""Charts of metrics as SVG, for pages on which no script runs: the same lines as the live charts draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....params.in_words import size
from ..markup import note, path, rect, short_number, svg, text, ticks
from ..style import INK, RUN_COLORS
from .chart_data import Table
from .chart_table import Line, charts_of

WIDTH, HEIGHT = 330, 150
LEFT, TOP, RIGHT, BOTTOM = 60, 22, 12, 20
"""Pixels of a chart, and of its margins."""


class Curve(NamedTuple):
    """Values over the steps; None where there is no value, nan where it is not finite."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]
    color: str = RUN_COLORS[0]
    unit: str = ""
    dashed: bool = False

    def parts(self) -> list[list[tuple[float, float]]]:
        """Return the points, apart where a value between them is not finite."""
        parts: list[list[tuple[float, float]]] = []
        after_gap = True
        for step, value in zip(self.steps, self.values, strict=True):
            if value is None:
                continue
            if not math.isfinite(value):
                after_gap = True
                continue
            if after_gap:
                parts.append([])
            parts[-1].append((step, value))
            after_gap = False
        return parts

    def words(self) -> str:
        """Return its first and newest value."""
        known = [value for value in self.values if value is not None]
        finite = [value for value in known if math.isfinite(value)]
        if not finite:
            return f"{self.label}: no finite value"
        now = number(known[-1], self.unit)
        return f"{self.label}: {number(finite[0], self.unit)} at first, {now} now"

    def newest(self) -> str:
        """Return its newest value; "" without one."""
        known = [value for value in self.values if value is not None]
        return number(known[-1], self.unit) if known else ""


@dataclass(frozen=True)
class Axes:
    """Maps steps and values to pixels."""

    last_step: float
    low: float
    high: float

    def pixel(self, step: float, value: float) -> tuple[float, float]:
        """Return the pixel of a value at a step; beyond the axes, the nearest on their edge."""
        across = min(1.0, max(0.0, step / self.last_step))
        up = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return LEFT + (WIDTH - LEFT - RIGHT) * across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - up)


def number(value: float, unit: str) -> str:
    """Return a value with its unit."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "bytes":
        return size(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    return f"{short_number(value)} {unit}".rstrip()


def static_charts(
    tables: Mapping[str, Table], *, total: int | None = None, predicted: Mapping[str, float | None] | None = None
) -> str:
    """Return SVG charts of all that some runs have measured, side by side where there is room; "" without any row.

    tables: points by the run's name, see `Columns.table`; "breaks" of one run are drawn and told. total: steps of the
    whole run. predicted: by metric.
    """
    keys: set[str] = set()
    for table in tables.values():
        keys |= table["values"].keys()
    breaks = [each for table in tables.values() for each in table.get("breaks", ())]
    pictures = ""
    for chart in charts_of(keys):
        for right in (False, True):  # one axis a picture
            lines = [line for line in chart.lines if line.right is right]
            curves = _curves_of(lines, tables)
            if curves:
                title = " and ".join(line.label for line in lines) if right else chart.title
                line_predicted = (predicted or {}).get(lines[0].key)
                pictures += draw(
                    title, curves, from_zero=chart.from_zero, total=total, predicted=line_predicted, breaks=breaks
                )
    told = "".join(note(each["words"]) for each in breaks)
    return f'<div class="mm-charts">{pictures}</div>{told}' if pictures else ""


def _curves_of(lines: Sequence[Line], tables: Mapping[str, Table]) -> list[Curve]:
    curves = []
    for run, (name, table) in enumerate(tables.items()):
        for line in lines:
            if line.key not in table["values"]:
                continue
            label = line.label
            if len(tables) > 1:
                label = f"{name}: {line.label}" if len(lines) > 1 else name
            color = RUN_COLORS[run % len(RUN_COLORS)] if len(tables) > 1 else RUN_COLORS[int(line.right)]
            values = [_plain(value) for value in table["values"][line.key]]
            curves.append(Curve(label, table["step"], values, color, line.unit, line.dashed))
    return curves


def _plain(value: Any) -> float | None:
    return math.nan if value == "nan" else value


def draw(
    title: str,
    curves: Sequence[Curve],
    *,
    from_zero: bool = False,
    total: int | None = None,
    predicted: float | None = None,
    label_newest: bool = True,
    breaks: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return curves in one chart as SVG.

    total: steps of the whole run; the axis shows at most twice the steps that are done. predicted: drawn as a
    horizontal line. label_newest: with the newest values beside the title, of at most two curves. breaks: see
    `Columns.breaks`; a line where the run stopped, and behind the curve the steps that ran again.
    """
    parts_of = [curve.parts() for curve in curves]
    values = [value for parts in parts_of for part in parts for _, value in part]
    newest_step = max([1.0, *(curve.steps[-1] for curve in curves if len(curve.steps))])
    last_step = max(newest_step, min(total, max(10.0, 2 * newest_step))) if total else newest_step
    axes = Axes(last_step, *_value_range([*values, *([predicted] if predicted else [])], from_zero))
    unit = curves[0].unit if curves else ""

    parts = [text(0, 12, title, size=12), *_breaks(axes, breaks), *_frame(axes, unit)]
    if predicted:
        _, y = axes.pixel(0, predicted)
        parts.append(path([(LEFT, y), (WIDTH - RIGHT, y)], INK, width=1.4, dash="6 4"))
        parts.append(text(WIDTH - RIGHT, y + 13, f"predicted {number(predicted, unit)}", size=12, anchor="end"))
    for curve, drawn in zip(curves, parts_of, strict=True):
        for part in drawn:
            points = [axes.pixel(*point) for point in part]
            if len(points) == 1:  # a path of one point would not be visible
                points.append((points[0][0] + 3, points[0][1]))
            parts.append(path(points, curve.color, dash="5 3" if curve.dashed else "none"))
    if label_newest and len(curves) <= 2:
        newest = [f"{curve.label} {curve.newest()}" if len(curves) > 1 else curve.newest() for curve in curves]
        parts.append(text(WIDTH, 12, ", ".join(newest), size=12, anchor="end"))
    words = "; ".join(curve.words() for curve in curves)
    return svg(WIDTH, HEIGHT, words if title in words else f"{title}. {words}", *parts)


def _breaks(axes: Axes, breaks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the breaks of a run."""
    parts = []
    for each in breaks:
        x, top = axes.pixel(each["stopped"], axes.high)
        if each["resumed"] is not None:
            left, _ = axes.pixel(each["resumed"], axes.high)
            parts.append(rect(left, top, x - left, HEIGHT - TOP - BOTTOM, f"{INK}33"))
        parts.append(path([(x, top), (x, HEIGHT - BOTTOM)], INK, width=1.4, dash="3 3"))
    return parts


def _frame(axes: Axes, unit: str) -> list[str]:
    """Return the axes with their numbers."""
    parts = []
    for value in ticks(axes.low, axes.high, 3):
        _, y = axes.pixel(0, value)
        parts.append(path([(LEFT, y), (WIDTH - RIGHT, y)], f"{INK}55", width=1))
        parts.append(text(LEFT - 5, y + 4, number(value, unit), size=12, anchor="end"))
    for step in ticks(0, axes.last_step, 3):
        x, _ = axes.pixel(step, 0)
        parts.append(text(x, HEIGHT - 5, short_number(step), size=12, anchor="middle"))
    return parts


def _value_range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """Return the ends of the axis of values; never equal."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = high - low
    low = min(0.0, low) if from_zero else low - 0.04 * margin
    high += 0.06 * margin
    if high > low:
        return low, high
    return low - 0.5 * abs(low) - 0.5, high + 0.5 * abs(high) + 0.5
