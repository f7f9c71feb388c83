"""Draw all ways to shard a run at once: what each sends against the most that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from ....params.in_words import size
from ..markup import svg, text, ticks, width_of
from ..style import FILL
from .rank_picture import FONT
from .step_picture import unit_of_bytes

if TYPE_CHECKING:
    from ...train.ways import ShardingWay

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 620, 250, 62, 22, 40, 130
RADIUS = 6
MARGIN = 0.4
"""Share of the range between least and most held, as room on both sides. A wall beyond stands at the edge."""


def ways_picture(ways: Sequence[ShardingWay], curve: Sequence[ShardingWay], *, capacity: int) -> str:
    """Return the ways as SVG; each dot is a button with the attribute data-way.

    ways: those that are refused are left out. curve: what AUTO chooses as its budget grows. capacity: bytes that a rank
    has.
    """
    planned = [way for way in ways if way.sent_bytes is not None and way.peak_bytes is not None]
    if not planned:
        return ""
    on_curve = [(way.peak_bytes or 0, way.sent_bytes or 0) for way in curve]
    points = [(way.peak_bytes or 0, way.sent_bytes or 0) for way in planned]
    held = [held for held, _ in [*points, *on_curve]]
    margin = MARGIN * (max(held) - min(held)) or max(held)
    left, right = max(0.0, min(held) - margin), max(held) + margin
    top = max(sent for _, sent in [*points, *on_curve]) * 1.08 or 1

    def place(held: float, sent: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (held - left) / (right - left)
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (1 - sent / top)

    parts = _axes(left, right, top)
    x, low = place(min(max(capacity, left), right), 0)
    words = f"memory of a rank: {size(capacity)}"
    if not left <= capacity <= right:
        words += ", further right" if capacity > right else ", further left"
    parts.append(f'<path d="M{x:.1f} {TOP - 4}V{low:.1f}" stroke="currentColor" stroke-width="3"/>')
    parts.append(text(x, TOP - 9, words, size=FONT, anchor="start" if capacity < (left + right) / 2 else "end"))
    if len(on_curve) > 1:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in sorted(on_curve)))
        title = "<title>what AUTO chooses as its budget grows</title>"
        parts.append(f'<path d="M{line}" fill="none" stroke="{FILL["gathered"]}" stroke-width="2">{title}</path>')
    dots = [(*place(*point), way) for point, way in zip(points, planned, strict=True)]
    parts += [
        _dot(x, y, label_y, way, capacity) for (x, y, way), label_y in zip(dots, _label_places(dots), strict=True)
    ]
    words = f"{len(planned)} ways to shard this run: bytes sent against the most that a rank holds"
    return svg(WIDTH, HEIGHT, words, *parts, role="group")


def words_of(way: ShardingWay, capacity: int) -> str:
    """Return a way with its figures in words, and that it does not fit if it does not. capacity: bytes of a rank."""
    words = f"{way.name}: sends {size(way.sent_bytes or 0)} in a step, holds at most {size(way.peak_bytes or 0)}"
    return words if fits(way, capacity) else f"{words}: DOES NOT FIT"


def fits(way: ShardingWay, capacity: int) -> bool:
    """Return whether a rank has room for the most that it holds."""
    return (way.peak_bytes or 0) <= capacity


def _axes(left: float, right: float, top: float) -> list[str]:
    """Return both axes with round numbers: what is held to the right, what is sent upwards."""
    parts, down = [], HEIGHT - BOTTOM
    factor, unit = unit_of_bytes(right)
    for value in ticks(left / factor, right / factor, 5):
        x = LEFT + (WIDTH - LEFT - RIGHT) * (value * factor - left) / (right - left)
        parts.append(text(x, down + 15, f"{value:g}", size=FONT, anchor="middle"))
    parts.append(text(WIDTH - RIGHT, down + 32, f"most that a rank holds, {unit}", size=FONT, anchor="end"))
    factor, unit = unit_of_bytes(top)
    for value in ticks(0, top / factor, 4):
        y = TOP + (down - TOP) * (1 - value * factor / top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".2"/>')
        parts.append(text(LEFT - 8, y + 4, f"{value:g}", size=FONT, anchor="end"))
    parts.append(text(0, TOP - 9, f"sent, {unit}", size=FONT))
    parts.append(f'<path d="M{LEFT} {TOP}V{down}H{WIDTH - RIGHT}" fill="none" stroke="currentColor"/>')
    return parts


def _label_places(dots: Sequence[tuple[float, float, ShardingWay]]) -> list[float]:
    """Return the y of each dot's label, so that none lies over another."""
    places = [y + 4 for _, y, _ in dots]
    order = sorted(range(len(dots)), key=lambda index: places[index])
    for before, after in pairwise(order):
        places[after] = max(places[after], places[before] + FONT + 2)
    return places


def _dot(x: float, y: float, label_y: float, way: ShardingWay, capacity: int) -> str:
    """Return a way as a dot that is pressed if the parameters choose it; one that does not fit is a ring."""
    color = FILL["trainable"] if way.is_chosen else FILL["frozen"]
    looks = f'fill="{color}" stroke="currentColor"'
    label = way.name
    if not fits(way, capacity):
        looks = f'fill="none" stroke="{color}" stroke-width="2"'
        label += ": does not fit"
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" {looks}/>'
    room = f'<rect x="{x - 9:.1f}" y="{label_y - 13:.1f}" width="{width_of(label, FONT) + 22:.1f}" height="18"'
    words = escape(words_of(way, capacity))
    return (
        f'<g class="mm-way" role="button" tabindex="0" data-way="{escape(way.name)}" aria-label="{words}" '
        f'aria-pressed="{str(way.is_chosen).lower()}"><title>{words}</title>{room} fill="transparent"/>{dot}'
        f"{text(x + 11, label_y, label, size=FONT)}</g>"
    )
