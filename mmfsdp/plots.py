"""Figures as SVG text: one palette and one style, legible on dark and on light pages, for screens and projectors."""

from __future__ import annotations

import io
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .style import FROZEN, INK, TRAINABLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .plan import Unit, WrapPlan

_POINTS = 500
_lock = threading.Lock()


def curve(rows: Iterable[Mapping[str, Any]], *, key: str = "loss", label: str = "", total: int | None = None) -> str:
    """A metric over the optimizer steps, as SVG. More than 500 steps are drawn as means within a band of extremes.

    rows: metrics rows; those without a finite `key` are left out. total: steps of the whole run, to fix the axis.
    """
    points = [(row["step"], row[key]) for row in rows if _finite(row.get(key)) and _finite(row.get("step"))]
    figure, axes = _canvas(6.4, 2.6, xlabel="step", ylabel=label or key.replace("_", " "))
    if points:
        steps, mean, low, high = _thin(points)
        if len(points) > _POINTS:
            axes.fill_between(steps, low, high, color=TRAINABLE, alpha=0.25, linewidth=0)
        axes.plot(steps, mean, color=TRAINABLE, linewidth=1.8, marker="o" if len(points) == 1 else "")
    if total:
        axes.set_xlim(0, total)
    words = f"{label or key}: {points[0][1]:.4g} at first, {points[-1][1]:.4g} now" if points else f"no {key} yet"
    return _svg(figure, words)


def bars(rows: Sequence[tuple[str, float | None, float | None]], *, unit: str) -> str:
    """Predicted beside measured, as SVG: one pair of bars per (label, predicted, measured); None draws no bar."""
    figure, axes = _canvas(6.4, 0.7 + 0.62 * len(rows), xlabel=unit)
    for column, (color, name) in enumerate([(INK, "predicted"), (TRAINABLE, "measured")]):
        known = [(i, row[1 + column]) for i, row in enumerate(rows) if _finite(row[1 + column])]
        places = [i + (column - 0.5) * 0.36 for i, _ in known]
        drawn = axes.barh(places, [value or 0 for _, value in known], 0.32, color=color, label=name)
        axes.bar_label(drawn, labels=[f"{value:,.4g}" for _, value in known], padding=4, color=INK, fontsize=9)
    axes.set_yticks(range(len(rows)), [_plain(row[0]) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return _svg(figure, "; ".join(f"{name}: {p} predicted, {m} measured" for name, p, m in rows))


def plan_picture(plan: WrapPlan) -> str:
    """The model as SVG: areas are bytes at rest, colors frozen and trainable, outlines units in the order they run in.

    The mouse on a unit shows its name, parameters and traffic.
    """
    from matplotlib.patches import Patch, Rectangle

    from .plan.table import count, size

    units = [(unit, *_bytes(unit)) for unit in plan.units if unit.numel]
    places = _mosaic([frozen + trainable for _, frozen, trainable in units], width=9.6, height=3.0)
    figure, axes = _canvas(9.6, 3.3)
    axes.set_axis_off()
    axes.set(xlim=(0, 9.6), ylim=(3.0, 0))
    titles = {}
    for (unit, frozen, trainable), (x, y, dx, dy) in zip(units, places, strict=True):
        share = frozen / (frozen + trainable)
        gid = f"unit-{unit.order}"
        titles[gid] = (
            f"{unit.name}: {unit.kind}, {count(unit.numel)} parameters, {size(unit.held_bytes)} on each rank, "
            f"gathered {unit.gathers_forward} x in forward and {unit.gathers_backward} x in backward"
        )
        axes.add_patch(Rectangle((x, y), dx * share, dy, facecolor=FROZEN, linewidth=0))
        axes.add_patch(Rectangle((x + dx * share, y), dx * (1 - share), dy, facecolor=TRAINABLE, linewidth=0))
        axes.add_patch(Rectangle((x, y), dx, dy, facecolor=(0, 0, 0, 0), edgecolor="white", linewidth=1.5, gid=gid))
        names = [text for text in _short_names(unit.name) if max(len(text), 5) * 0.065 < dx]
        if names and dy > 0.16:
            words = names[0] + (f"\n{count(unit.numel)}" if dy > 0.4 else "")
            axes.text(x + 0.05, y + 0.05, _plain(words), color="white", fontsize=7.5, va="top", linespacing=1.4)
    keys = [Patch(color=FROZEN, label="frozen"), Patch(color=TRAINABLE, label="trainable")]
    axes.legend(
        handles=keys, frameon=False, labelcolor=INK, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2
    )
    return _svg(figure, f"{len(units)} units of the model, area by bytes", titles)


def _short_names(name: str) -> list[str]:
    """The ends of a unit's dotted name that say something, longest first: layers.0.attention, attention."""
    parts = name.split("{")[0].rstrip(".").split(".")
    return [".".join(parts[i:]) for i in range(max(0, len(parts) - 3), len(parts)) if not parts[i][:1].isdigit()]


def _bytes(unit: Unit) -> tuple[int, int]:
    """(frozen, trainable) bytes at rest of a whole unit."""
    from .plan.units import ITEMSIZE

    sizes = [(p.trainable, p.numel * ITEMSIZE[p.dtype]) for p in unit.params]
    return sum(n for trains, n in sizes if not trains), sum(n for trains, n in sizes if trains)


def _mosaic(areas: Sequence[float], *, width: float, height: float) -> list[tuple[float, float, float, float]]:
    """(x, y, dx, dy) of rectangles with these relative areas, in columns from left to right, none overlong if avoidable
    (squarified treemaps, Bruls et al. 2000, but the order is kept).
    """
    scale = width * height / (sum(areas) or 1)
    columns: list[list[float]] = []
    for area in (a * scale for a in areas):
        if columns and _worst([*columns[-1], area], height) <= _worst(columns[-1], height):
            columns[-1].append(area)
        else:
            columns.append([area])
    places, x = [], 0.0
    for column in columns:
        y, dx = 0.0, sum(column) / height
        for area in column:
            places.append((x, y, dx, area / dx))
            y += area / dx
        x += dx
    return places


def _worst(column: Sequence[float], height: float) -> float:
    """The greatest ratio of sides in a column."""
    dx = sum(column) / height
    return max(max(dx * dx / area, area / (dx * dx)) for area in column)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _thin(points: Sequence[tuple[float, float]]) -> tuple[Any, Any, Any, Any]:
    """(steps, means, lowest, highest) of at most 500 runs of neighboring points."""
    import numpy as np

    x, y = np.asarray(points, dtype=float).T
    starts = np.linspace(0, len(x), min(len(x), _POINTS), endpoint=False).astype(int)
    counts = np.diff([*starts, len(x)])
    mean = np.add.reduceat(y, starts) / counts
    return x[starts + counts - 1], mean, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _plain(text: object) -> str:
    """Text that matplotlib will not take for mathematics."""
    return str(text).replace("$", r"\$")


def _canvas(width: float, height: float, *, xlabel: str = "", ylabel: str = "") -> tuple[Figure, Axes]:
    """A figure of so many inches in the house style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xlabel(_plain(xlabel), color=INK)
    axes.set_ylabel(_plain(ylabel), color=INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(axis="y" if ylabel else "x", color=INK, alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, words: str, titles: Mapping[str, str] | None = None) -> str:
    """The figure as an <svg> element that scales down with its page.

    words: what it shows, for screen readers. titles: what appears under the mouse, by the artist's gid.
    """
    from matplotlib import rcParams
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    style: dict[Any, str] = {"svg.fonttype": "none", "svg.hashsalt": "mmfsdp"}
    out = io.StringIO()
    with _lock:  # these two settings are global; drawing threads take turns, and leave a person's own as they were
        before = {name: rcParams[name] for name in style}
        rcParams.update(style)
        try:
            FigureCanvasSVG(figure).print_svg(out, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"]))
        finally:
            rcParams.update(before)
    text = out.getvalue().replace(f"fill: {INK}", "fill: currentColor")
    # matplotlib's style sheet would reach every picture of the page around it; the same style here stays inside.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)
    style_here = "max-width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt"
    opening = f'role="img" style="{style_here}"><title>{escape(words)}</title>'
    text = re.sub(r"^.*?<svg ([^>]*)>", lambda m: f"<svg {m[1]} {opening}", text, count=1, flags=re.S)
    for gid, title in (titles or {}).items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(title)}</title>', 1)
    return text
