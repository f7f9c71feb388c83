"""Metrics over the optimizer steps as SVG charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .markup import path, short_number, svg, text, ticks
from .style import FROZEN, INK, TRAINABLE

WIDTH, HEIGHT = 330, 150
LEFT, TOP, RIGHT, BOTTOM = 44, 22, 44, 20
"""Pixels of a chart, and of its margins."""
MAX_POINTS = 300
"""Points of a line that are drawn: about one for each pixel."""


class Metric(NamedTuple):
    """The drawing of one column of metrics.jsonl."""

    title: str
    """With the unit."""
    scale: float = 1.0
    """Size of one unit."""
    from_zero: bool = False


HELD_OUT = "heldout_loss"
METRICS = {
    "loss": Metric("loss"),
    HELD_OUT: Metric("held-out loss"),
    "grad_norm": Metric("gradient norm"),
    "lr": Metric("learning rate", from_zero=True),
    "samples_per_s": Metric("throughput (samples/s)", from_zero=True),
    "memory_bytes": Metric("peak memory of rank 0 (MiB)", 2**20, from_zero=True),
}
"""Metrics that are drawn, by their key in metrics.jsonl."""


SCORE = "scores."
"""Key of a person's own score among the curves, before its name (`train.metrics`)."""
MAX_SCORES, MAX_NAME = 24, 40
"""Scores of a run that are drawn, and letters of a name: anybody may have written the file."""


def metric_of(key: str) -> Metric:
    """Return the drawing of a metric, or of a person's own score."""
    return METRICS.get(key) or Metric(key.removeprefix(SCORE))


class Point(NamedTuple):
    """A value at a step; nan where it was not finite."""

    step: int
    value: float


class History(dict[str, list[Point]]):
    """The values of METRICS and of own scores that a run has written so far, by key, and its newest row.

    A value that is not finite is kept as nan: it is drawn as a gap.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        """rows: of metrics.jsonl, in their order."""
        self.newest: Mapping[str, Any] = {}
        for row in rows:
            self.newest = row
            for key in METRICS:
                if key in row:
                    self._add(key, row.get("step"), row[key])
            for name, value in list(row.get("scores", {}).items())[:MAX_SCORES]:
                self._add(f"{SCORE}{name[:MAX_NAME]}", row.get("step"), value)

    def _add(self, key: str, step: Any, value: Any) -> None:
        points = self.setdefault(key, [])
        if is_finite(step) and type(value) in (int, float):
            points.append(Point(step, value if is_finite(value) else math.nan))


def is_finite(number: Any) -> bool:
    """Return True for a number that can be drawn."""
    return type(number) in (int, float) and abs(number) < 1e300  # math.isfinite raises on a huge int


class Line(NamedTuple):
    """A value over the steps in a chart."""

    name: str
    points: Sequence[Point]
    color: str = TRAINABLE

    def drawn(self) -> list[Point]:
        """Return every n-th point, and the newest, of each part between gaps."""
        points: list[Point] = []
        for part in self.parts():
            points += part
        return points

    def parts(self) -> list[list[Point]]:
        """Return the points that are drawn, apart where a value between them was not finite."""
        step = len(self.points) // MAX_POINTS + 1
        parts: list[list[Point]] = []
        after_gap = True
        for point in self.points:
            if math.isnan(point.value):
                after_gap = True
                continue
            if after_gap:
                parts.append([])
            parts[-1].append(point)
            after_gap = False
        return [[*part[:-1:step], part[-1]] for part in parts]

    @property
    def newest(self) -> float:
        """The newest value of the line; nan where it is not finite, and for a line without points."""
        return self.points[-1].value if self.points else math.nan


@dataclass(frozen=True)
class Axes:
    """Maps steps and values to pixels."""

    last_step: int
    low: float
    high: float
    scale: float
    """Size of one unit of the axis."""

    def pixel(self, step: float, value: float) -> tuple[float, float]:
        """Return the pixel of a value at a step; beyond the axes, the nearest on their edge."""
        across = min(1.0, step / self.last_step)
        up = (value / self.scale - self.low) / (self.high - self.low)
        up = min(1.0, max(0.0, up))
        return LEFT + (WIDTH - LEFT - RIGHT) * across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - up)


def charts(history: History, *, total: int | None = None, predicted: Mapping[str, float | None] | None = None) -> str:
    """Return charts of all that a run has measured, side by side where there is room.

    total: steps of the whole run. predicted: values by the metric's key.
    """
    pictures = []
    for key in (*METRICS, *(key for key in history if key.startswith(SCORE))):
        metric = metric_of(key)
        if key not in history or key == HELD_OUT:
            continue
        lines = [Line("", history[key])]
        if key == "loss" and HELD_OUT in history:
            lines.append(Line("held-out", history[HELD_OUT], FROZEN))
        pictures.append(chart(metric, lines, total=total, predicted=(predicted or {}).get(key)))
    return f'<div class="mm-charts">{"".join(pictures)}</div>' if pictures else ""


def chart(metric: Metric, lines: Sequence[Line], *, total: int | None = None, predicted: float | None = None) -> str:
    """Return one metric over the steps as SVG.

    total: steps of the whole run; the axis shows at most twice the steps that are done. predicted: drawn as a
    horizontal line.
    """
    points: list[Point] = []
    for line in lines:
        points += line.drawn()
    newest_step = max([1, *(line.points[-1].step for line in lines if line.points)])
    last_step = min(total, max(10, 2 * newest_step)) if total else newest_step
    axes = Axes(last_step, *_value_range(metric, points, predicted), metric.scale)

    parts = [text(0, 12, metric.title, size=12), *_frame(axes)]
    if predicted:
        _, y = axes.pixel(0, predicted)
        label = f"- - predicted {short_number(predicted / metric.scale)}"
        parts.append(path([(LEFT, y), (WIDTH - RIGHT, y)], FROZEN, width=1.4, dash="5 3"))
        parts.append(text(WIDTH, 12, label, size=10, anchor="end"))
    of_one_run = not lines[0].name
    summary = []
    for line in lines:
        drawn = line.drawn()
        first, now = (drawn[0].value if drawn else math.nan) / metric.scale, line.newest / metric.scale
        parts += _line(axes, line, labeled=not line.name or len(lines) == 1)
        if of_one_run and line.name:  # two lines that end together would write over each other
            label = f"{line.name} {_words(now, short_number)}"
            parts.append(text(WIDTH, 12, label, size=10, anchor="end", color=line.color))
        summary.append(f"{line.name or metric.title}: {_words(first)} at first, {_words(now)} now")
    return svg(WIDTH, HEIGHT, "; ".join(summary), *parts)


def _words(value: float, form: Callable[[float], str] = "{:.4g}".format) -> str:
    """Return a value in words, also one that is not finite."""
    return form(value) if math.isfinite(value) else "not finite"


def _frame(axes: Axes) -> list[str]:
    """Return grid lines and the numbers of both axes."""
    parts = []
    for value in ticks(axes.low, axes.high):
        _, y = axes.pixel(0, value * axes.scale)
        parts.append(path([(LEFT, y), (WIDTH - RIGHT, y)], f"{INK}44", width=0.7))
        parts.append(text(LEFT - 5, y + 4, short_number(value), size=10, anchor="end"))
    for step in ticks(0, axes.last_step, 3):
        x, _ = axes.pixel(step, 0)
        parts.append(text(x, HEIGHT - 5, short_number(step), size=10, anchor="middle"))
    return parts


def _line(axes: Axes, line: Line, *, labeled: bool) -> list[str]:
    """Return a line; labeled: with its newest value at its end."""
    drawn = []
    x, y = float(LEFT), (TOP + HEIGHT - BOTTOM) / 2
    for part in line.parts():
        points = [axes.pixel(point.step, point.value) for point in part]
        x, y = points[-1]
        if len(points) == 1:  # a path of one point would not be visible
            points.append((x + 3, y))
        drawn.append(path(points, line.color))
    if labeled and line.points:
        newest = _words(line.newest / axes.scale, short_number)
        if newest == "not finite":  # a long text; the line ends before the axis does
            drawn.append(text(min(x + 5, WIDTH - 52.0), y + 4, newest, size=10, color=line.color))
        else:
            drawn.append(text(x + 5, y + 4, newest, color=line.color))
    return drawn


def _value_range(metric: Metric, points: Sequence[Point], predicted: float | None) -> tuple[float, float]:
    """Return the ends of the axis of values, in its unit; never equal."""
    values = [predicted / metric.scale] if predicted else []
    values += [point.value / metric.scale for point in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = high - low
    low = min(0.0, low) if metric.from_zero else low - 0.04 * margin
    high += 0.06 * margin
    if high > low:
        return low, high
    return low - 0.5 * abs(low) - 0.5, high + 0.5 * abs(high) + 0.5
