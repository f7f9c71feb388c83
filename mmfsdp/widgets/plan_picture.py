"""A plan as a picture: units as areas, frozen and trainable bytes as colors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..core.plan import ITEMSIZE, Param, Unit, WrapPlan
from ..params.numbers import count, size
from .markup import rect, svg, text, width_of
from .style import FROZEN, TRAINABLE

WIDTH, MAP_TOP, MAP_HEIGHT, DETAILS_HEIGHT = 920, 24, 290, 54
"""Pixels: of the picture, of the legend above the map, of the map, and of the details below it."""
Box = tuple[float, float, float, float]
"""x, y, width and height in pixels."""


def plan_picture(plan: WrapPlan) -> str:
    """Return the model as SVG: a unit's area is its bytes at rest, in the order in which units run.

    The mouse on a unit, or the keyboard's focus, shows its name, parameters and traffic below.
    """
    parts = []
    for index, (name, color) in enumerate((("frozen", FROZEN), ("trainable", TRAINABLE))):
        parts += [rect(90 * index, 3, 13, 13, color), text(90 * index + 18, 14, name, size=12)]
    units = [unit for unit in plan.units if unit.numel]
    boxes = treemap([_stored_bytes(unit.params) for unit in units], width=WIDTH, height=MAP_HEIGHT)
    parts += [_unit(unit, box) for unit, box in zip(units, boxes, strict=True)]
    hint = text(0, MAP_TOP + MAP_HEIGHT + 15, "Point at a unit, or go to it with Tab, for its details.", size=12)
    parts.append(f'<g class="mm-hint mm-quiet">{hint}</g>')
    description = f"{len(units)} units of the model, area by bytes"
    return svg(WIDTH, MAP_TOP + MAP_HEIGHT + DETAILS_HEIGHT, description, *parts, role="list")


def _stored_bytes(params: Iterable[Param]) -> int:
    """Return the bytes of parameters, on all ranks together."""
    return sum(param.numel * ITEMSIZE[param.dtype] for param in params)


def _unit(unit: Unit, box: Box) -> str:
    """Return a unit's rectangle and its details, which the mouse shows."""
    x, y, width, height = box
    y += MAP_TOP
    frozen_share = _stored_bytes(param for param in unit.params if not param.trainable) / _stored_bytes(unit.params)
    parts = [
        rect(x, y, width * frozen_share, height, FROZEN),
        rect(x + width * frozen_share, y, width * (1 - frozen_share), height, TRAINABLE),
    ]
    name = next((name for name in _short_names(unit.name) if max(width_of(name, 10), 32) + 8 < width), "")
    if name and height > 15:
        parts.append(text(x + 5, y + 13, name, size=10, color="white"))
    if name and height > 34:
        parts.append(text(x + 5, y + 27, count(unit.numel), size=10, color="white"))

    policy = f", {unit.frozen_policy}" if unit.frozen_policy else ""
    facts = f"{unit.kind}{policy}, {count(unit.numel)} parameters, {size(unit.bytes_at_rest)} on each rank"
    traffic = f"gathered {unit.gathers_forward} x in forward and {unit.gathers_backward} x in backward"
    title = f"{unit.name}: {facts}, {traffic}"
    edge = 'stroke="white" stroke-width="1.5"'
    parts.append(rect(x, y, width, height, "transparent", outline=edge))
    details = ""
    for index, line in enumerate((unit.name, facts, traffic)):
        details += text(0, MAP_TOP + MAP_HEIGHT + 15 + 17 * index, line, size=13)
    label = f'role="listitem" tabindex="0" aria-label="{escape(title)}"'
    return f'<g class="mm-unit" {label}>{"".join(parts)}<g class="mm-detail" display="none">{details}</g></g>'


def _short_names(name: str) -> list[str]:
    """Return the ends of a unit's dotted name that say something, longest first: layers.0.attention, attention."""
    common, _, members = name.partition("{")
    parts = (common.rstrip(".") or members.rstrip("}")).split(".")
    names = []
    for start in range(max(0, len(parts) - 3), len(parts)):
        if not parts[start][:1].isdigit():
            names.append(".".join(parts[start:]))
    if not names:
        return [name]
    return [*names, *parts[-1].split(",")[1:][-1:]]


def treemap(areas: Sequence[float], *, width: float, height: float) -> list[Box]:
    """Return a box for each relative area, in columns from left to right, as square as the order allows.

    Squarified treemaps (Bruls et al., 2000), but the order is kept.
    """
    scale = width * height / (sum(areas) or 1)
    columns: list[list[float]] = []
    for area in areas:
        area *= scale
        if columns and _longest_ratio([*columns[-1], area], height) <= _longest_ratio(columns[-1], height):
            columns[-1].append(area)
        else:
            columns.append([area])
    boxes, x = [], 0.0
    for column in columns:
        y, column_width = 0.0, sum(column) / height
        for area in column:
            boxes.append((x, y, column_width, area / column_width))
            y += area / column_width
        x += column_width
    return boxes


def _longest_ratio(column: Sequence[float], height: float) -> float:
    """Return the greatest ratio of sides in a column of areas."""
    width = sum(column) / height
    return max(max(width * width / area, area / (width * width)) for area in column)
