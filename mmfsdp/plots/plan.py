"""A plan as a picture: who shares a unit with whom, and what is frozen."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape
from typing import TYPE_CHECKING

from .style import FROZEN, TRAINABLE
from .svg import rect, svg, text, width_of

if TYPE_CHECKING:
    from ..plan import Unit, WrapPlan

WIDTH, HEIGHT, KEYS, FOOT = 920, 290, 24, 54


def plan_picture(plan: WrapPlan, *, marked: Container[str] = (), width: float = WIDTH) -> str:
    """The model as SVG: areas are bytes at rest, colors frozen and trainable, outlines units in the order they run in.

    The mouse on a unit, or the keyboard's focus, shows its name, parameters and traffic below. marked: names of units
    to point out. width: pixels; less of it leaves letters larger where a page is narrow.
    """
    units = [(unit, *_bytes(unit)) for unit in plan.units if unit.numel]
    places = _mosaic([frozen + trainable for _, frozen, trainable in units], width=width, height=HEIGHT)
    parts = []
    for i, (name, color) in enumerate((("frozen", FROZEN), ("trainable", TRAINABLE))):
        parts += [rect(90 * i, 3, 13, 13, color), text(90 * i + 18, 14, name, size=12)]
    for (unit, frozen, trainable), place in zip(units, places, strict=True):
        parts.append(_unit(unit, frozen / (frozen + trainable), place, marked=unit.name in marked))
    words = f"{len(units)} units of the model, area by bytes"
    hint = text(0, KEYS + HEIGHT + 15, "Point at a unit, or go to it with Tab, for its details.", size=12)
    parts.append(f'<g class="mm-hint">{hint}</g>')
    return svg(width, HEIGHT + KEYS + FOOT, words, *parts, role="list")


def _unit(unit: Unit, share: float, place: tuple[float, float, float, float], *, marked: bool) -> str:
    """A unit's rectangle, with what appears under the mouse. share: of its bytes that are frozen."""
    from ..plan.table import count, size

    (x, y, dx, dy), foot = place, KEYS + HEIGHT
    policy = f", {unit.frozen_policy}" if unit.frozen_policy else ""
    facts = (
        f"{unit.kind}{policy}, {count(unit.numel)} parameters, {size(unit.held_bytes)} on each rank",
        f"gathered {unit.gathers_forward} x in forward and {unit.gathers_backward} x in backward"
        + (f", there ahead of it {unit.ahead_backward}" if unit.ahead_backward else ""),
    )
    top = y + KEYS
    parts = [rect(x, top, dx * share, dy, FROZEN), rect(x + dx * share, top, dx * (1 - share), dy, TRAINABLE)]
    names = [words for words in _short_names(unit.name) if max(width_of(words, 10), 32) + 8 < dx]
    if names and dy > 15:
        parts.append(text(x + 5, top + 13, names[0], size=10, color="white"))
        if dy > 34:
            parts.append(text(x + 5, top + 27, count(unit.numel), size=10, color="white"))
    title = f"{unit.name}: {', '.join(facts)}" + ", differs" * marked
    if marked:
        parts.append(rect(x + 2, top + 2, dx - 4, dy - 4, "none", outline="white", stroke=2, dash="7 4"))
    parts.append(rect(x, top, dx, dy, "transparent", title=title, outline="white"))
    lines = "".join(text(0, foot + 15 + 17 * i, line, size=13) for i, line in enumerate((unit.name, *facts)))
    label = f'role="listitem" tabindex="0" aria-label="{escape(title)}"'
    return f'<g class="mm-unit" {label}>{"".join(parts)}<g class="mm-detail" display="none">{lines}</g></g>'


def _short_names(name: str) -> list[str]:
    """The ends of a unit's dotted name that say something, longest first: layers.0.attention, attention."""
    together, _, apart = name.partition("{")
    parts = (together.rstrip(".") or apart.rstrip("}")).split(".")
    ends = [".".join(parts[i:]) for i in range(max(0, len(parts) - 3), len(parts)) if not parts[i][:1].isdigit()]
    return [*ends, *parts[-1].split(",")[1:][-1:]] if ends else [name]


def _bytes(unit: Unit) -> tuple[int, int]:
    """(frozen, trainable) bytes at rest of a whole unit."""
    from ..plan.units import ITEMSIZE

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
