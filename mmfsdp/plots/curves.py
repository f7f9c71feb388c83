"""Metrics over the optimizer steps, in bounded memory however long the run is, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from .style import FROZEN, INK, TRAINABLE
from .svg import area, dot, path, short, svg, text, ticks, width_of

WIDTH, HEIGHT = 330, 150
LEFT, TOP, RIGHT, BOTTOM = 44, 22, 44, 20
"""Pixels of a chart, and of its edges."""
DASHES = ("", "6 3", "2 3")
"""Lines beyond the sixth are told apart by these, too."""


class Metric(NamedTuple):
    """How a column of metrics.jsonl is shown."""

    title: str
    unit: str = ""
    scale: float = 1.0
    """What one unit is."""
    from_zero: bool = False
    noisy: bool = False
    """Its steps are drawn faintly, and over them how it goes."""


HELD_OUT = "heldout_loss"
METRICS = {
    "loss": Metric("loss", noisy=True),
    HELD_OUT: Metric("held-out loss"),
    "grad_norm": Metric("gradient norm", noisy=True),
    "lr": Metric("learning rate", from_zero=True),
    "samples_per_s": Metric("throughput", "samples/s", from_zero=True, noisy=True),
    "memory_bytes": Metric("peak memory of rank 0", "MiB", 2**20, from_zero=True),
    "step_s": Metric("time of a step", "s", from_zero=True, noisy=True),
}
"""What is drawn of a run."""
SMOOTHED = 20
"""A noisy line is averaged over one in so many of its points; of fewer points it is drawn as it is."""


@dataclass(slots=True)
class Bucket:
    """Neighboring steps."""

    step: int
    """The last of them."""
    total: float
    """Of their values."""
    low: float
    high: float
    count: int = 1

    @property
    def mean(self) -> float:
        """Of the steps' values."""
        return self.total / self.count

    def merge(self, other: Bucket) -> Bucket:
        """Itself, with the steps that follow taken in."""
        self.step, self.total, self.count = other.step, self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        return self


@dataclass
class Series:
    """A value over the steps in bounded memory: when there are too many buckets, neighbors become one."""

    most: int = 300
    buckets: list[Bucket] = field(default_factory=list)
    first: float | None = None
    newest: float | None = None
    _stride: int = 1

    def add(self, step: Any, value: Any) -> None:
        """A value at a step, which is not before those already there. What is no finite number is left out."""
        if not (_finite(value) and _finite(step)):
            return
        self.newest = value
        if self.buckets and (last := self.buckets[-1]).count < self._stride:
            last.step, last.total, last.count = step, last.total + value, last.count + 1
            if value < last.low:
                last.low = value
            elif value > last.high:
                last.high = value
            return
        self.first = value if self.first is None else self.first
        self.buckets.append(Bucket(step, value, value, value))
        if len(self.buckets) == self.most:
            self.buckets = [a.merge(b) for a, b in zip(self.buckets[::2], self.buckets[1::2], strict=True)]
            self._stride *= 2


class History(dict[str, Series]):
    """The series of METRICS that a run has written so far."""

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in rows of metrics.jsonl, in their order."""
        for row in rows:
            for key in METRICS:
                if key in row:
                    self.setdefault(key, Series()).add(row.get("step"), row[key])


class Line(NamedTuple):
    """One series of a chart."""

    name: str
    series: Series
    color: str = TRAINABLE
    dash: str = ""


def chart(
    metric: Metric,
    lines: Sequence[Line],
    *,
    total: int | None = None,
    predicted: float | None = None,
    marks: Iterable[tuple[int, str]] = (),
    beside: Line | None = None,
) -> str:
    """One metric over the steps, as SVG; where a point stands for several steps, with a band of their extremes.

    total: steps of the whole run; the axis shows them, but at most twice as many as there are so far. predicted: drawn
    as a level line. marks: (step, words) of events. beside: what is known at some steps only, drawn with its points.
    """
    every = [line for line in [*lines, *([beside] if beside else [])] if line.series.buckets]
    lines = [line for line in every if line is not beside]
    level = predicted / metric.scale if predicted else None
    buckets = [b for line in every for b in line.series.buckets]
    last = max([1, *(b.step for b in buckets)])
    shown = min(total, max(10, 2 * last)) if total else last
    low, high = _range(metric, buckets, level)
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(step: float, value: float) -> tuple[float, float]:
        share = (value / metric.scale - low) / (high - low)
        return LEFT + wide * min(1.0, step / shown), TOP + tall * (1 - min(1.0, max(0.0, share)))

    parts = [text(0, 12, metric.title + (f" ({metric.unit})" if metric.unit else ""), size=12)]
    for value in ticks(low, high):
        y = at(0, value * metric.scale)[1]
        parts += [path([(LEFT, y), (LEFT + wide, y)], f"{INK}44", width=0.7)]
        parts += [text(LEFT - 5, y + 4, short(value), size=10, anchor="end")]
    for step in ticks(0, shown, 3):
        parts.append(text(at(step, 0)[0], HEIGHT - 5, short(step), size=10, anchor="middle"))
    for step, words in marks:
        x = at(step, 0)[0]
        sign = path([(x, TOP), (x, TOP + tall)], INK, width=1.4, dash="1 3") + text(x, TOP, "▼", anchor="middle")
        parts.append(f"<g><title>{escape(f'step {step}: {words}')}</title>{sign}</g>")
    if level is not None:
        y = at(0, level * metric.scale)[1]
        parts += [path([(LEFT, y), (LEFT + wide, y)], FROZEN, width=1.4, dash="5 3")]
        parts += [text(WIDTH, 12, f"- - predicted {short(level)}", size=10, anchor="end", color=FROZEN)]
    ends = []
    for line in every:
        drawn, newest = _drawn(line, at, band=len(lines) == 1, smooth=metric.noisy and line is not beside)
        parts += drawn
        if line is beside or len(lines) == 1:
            ends.append((at(last, newest)[1], short(newest / metric.scale), line.color))
        if line is beside:
            parts += [dot(*at(b.step, b.mean), line.color) for b in line.series.buckets]
            parts.append(text(WIDTH, 12, f"● {line.name}", size=10, anchor="end", color=line.color))
    parts += [text(at(last, 0)[0] + 5, y + 4, words, color=color) for y, words, color in _apart(ends)]
    return svg(WIDTH, HEIGHT, "; ".join(_words(metric, line) for line in every) or f"no {metric.title} yet", *parts)


def charts(
    history: History,
    *,
    total: int | None = None,
    predicted: Mapping[str, float] | None = None,
    marks: Iterable[tuple[int, str]] = (),
) -> str:
    """All that a run has measured, side by side where there is room. predicted: levels by the metric's key."""
    marks, predicted = list(marks), predicted or {}
    beside = {"loss": Line("held-out", history[HELD_OUT], FROZEN)} if HELD_OUT in history else {}
    drawn = [
        chart(
            metric,
            [Line("", history[key])],
            total=total,
            predicted=predicted.get(key),
            marks=marks,
            beside=beside.get(key),
        )
        for key, metric in METRICS.items()
        if key in history and history[key].buckets and key != HELD_OUT
    ]
    return f'<div class="mm-charts">{"".join(drawn)}</div>' if drawn else ""


def figure(pictures: Sequence[str], *, names: Mapping[str, tuple[str, str]], columns: int = 2) -> str:
    """Charts of one kind as a single SVG, for a paper. names: (color, dashes) of each line by its name."""
    keys, x, tall = [], 0.0, HEIGHT + 14
    y = tall * -(-len(pictures) // columns) + 16.0
    for name, (color, dash) in names.items():
        if x + 40 + width_of(name, 12) > WIDTH * columns:
            x, y = 0.0, y + 18
        keys += [path([(x, y - 4), (x + 22, y - 4)], color, width=2, dash=dash), text(x + 28, y, name, size=12)]
        x += 46 + width_of(name, 12)
    placed = [
        picture.replace("<svg ", f'<svg x="{WIDTH * (i % columns)}" y="{tall * (i // columns)}" ', 1)
        for i, picture in enumerate(pictures)
    ]
    return svg(WIDTH * columns, y + 8, f"runs compared: {', '.join(names)}", *placed, *keys)


def _drawn(line: Line, at: Any, *, band: bool, smooth: bool) -> tuple[list[str], float]:
    """(its elements, its last value as they show it)."""
    buckets, parts = line.series.buckets, []
    if band and any(b.count > 1 for b in buckets):
        upper, lower = ([at(b.step, getattr(b, edge)) for b in buckets] for edge in ("high", "low"))
        parts.append(area(upper + lower[::-1], line.color))
    values, words = [b.mean for b in buckets], line.name
    if smooth and len(buckets) > SMOOTHED:
        parts.append(path(_points(buckets, values, at), line.color, width=1, opacity=0.4))
        values = smoothed(values)
        over = round(buckets[-1].step / SMOOTHED)
        words += f"{': ' * bool(words)}averaged over about {over} steps, the newest weighing most"
    drawn = path(_points(buckets, values, at), line.color, dash=line.dash)
    return [*parts, f"<g><title>{escape(words)}</title>{drawn}</g>" if words else drawn], values[-1]


def _points(buckets: Sequence[Bucket], values: Sequence[float], at: Any) -> list[tuple[float, float]]:
    points = [at(b.step, value) for b, value in zip(buckets, values, strict=True)]
    return points if len(points) > 1 else [points[0], (points[0][0] + 3, points[0][1])]


def smoothed(values: Sequence[float]) -> list[float]:
    """Their exponential moving average, (N,) to (N,), over a twentieth of them; the first ones weigh in full, as in
    TensorBoard's."""
    keep = max(0.0, 1 - 2 / (len(values) / SMOOTHED + 1))
    found, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found


def _apart(ends: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Labels (y, words, color) at the ends of one line or two, from above, not over each other."""
    ends = sorted(ends)
    if len(ends) == 2 and (gap := 12 - (ends[1][0] - ends[0][0])) > 0:
        return [(y + shift, *rest) for (y, *rest), shift in zip(ends, (-gap / 2, gap / 2), strict=True)]  # type: ignore[misc]
    return ends


def _range(metric: Metric, buckets: Sequence[Bucket], level: float | None) -> tuple[float, float]:
    """Of the axis of values, in its unit; never empty."""
    values = [v / metric.scale for b in buckets for v in (b.low, b.high)] + ([] if level is None else [level])
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = min(0.0, low) if metric.from_zero else low - 0.04 * (high - low)
    high += 0.06 * (high - low)
    return (low, high) if high > low else (low - 0.5 * abs(low) - 0.5, high + 0.5 * abs(high) + 0.5)


def _words(metric: Metric, line: Line) -> str:
    first, newest = ((x or 0.0) / metric.scale for x in (line.series.first, line.series.newest))
    return f"{line.name or metric.title}: {first:.4g} at first, {newest:.4g} now"


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # math.isfinite raises on an int beyond any float
