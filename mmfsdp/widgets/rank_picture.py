"""Draw what each rank holds between steps: a lane for each rank, a box for each unit."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..core.plan import Unit, UnitKind, WrapPlan
from ..params import FrozenPolicy
from ..params.numbers import size
from .markup import svg, text, width_of
from .style import FILL
from .unit_boxes import Box, about, box_of_unit, part_name, pattern_name, short_text, unit_boxes

WIDTH = 760
"""Pixels. No picture is scaled down in a cell of JupyterLab at 1280 pixels with its side bar open."""
LEFT = 62
"""Where the lanes begin, after the names of the ranks."""
ALL_RANKS = 8
"""Of more ranks, only the first, the second and the last are drawn."""
LANES_HEIGHT, MIN_LANE, MAX_LANE, LANE_GAP = 80, 13, 34, 5
MIN_BOX, MIN_STRIPE, BOX_GAP = 3.0, 2.0, 2.0
PART_ROW = MARK_ROW = PATTERN_ROW = LEGEND_ROW = 17
FONT = 12
LETTERS = {FrozenPolicy.SHARD: "S", FrozenPolicy.KEEP: "K", FrozenPolicy.REPLICATE: "R"}
MARK = "∇"
"""Of a frozen unit that gradients pass through."""


def rank_picture(plan: WrapPlan, *, width: int = WIDTH, merged: bool = True) -> str:
    """Return the units of each rank as SVG: what it stores is filled, what other ranks store is a dashed outline.

    A box has the width of its parameters. merged: patterns that repeat are one box each. Boxes of one unit have the
    class mm-b0, mm-b1, ... of its merged box; those of the first lane take the keyboard's focus. Without merging only
    that lane is drawn.
    """
    boxes = unit_boxes(plan, merged=merged)
    numbers = box_of_unit(unit_boxes(plan))
    width = max(width, LEFT + int(len(boxes) * (MIN_BOX + BOX_GAP)) + 60)  # a picture of hundreds of boxes is wider
    places = _places(boxes, width - LEFT)
    ranks = _shown_ranks(plan) if merged else [0]
    lane = min(MAX_LANE, max(MIN_LANE, (LANES_HEIGHT - LANE_GAP * (len(ranks) - 1)) / len(ranks)))
    top: float = PART_ROW
    parts = _part_names(boxes, places, width)
    marks = _marks(plan, boxes, places, top + FONT)
    if marks:
        parts += marks
        top += MARK_ROW
    first = True
    for rank in ranks:
        if rank is None:
            parts.append(text(LEFT, top + 8, "⋮", size=FONT))
            top += 14
            continue
        parts.append(text(LEFT - 8, top + lane / 2 + 4, f"rank {rank}", size=FONT, anchor="end"))
        for box, (x, box_width) in zip(boxes, places, strict=True):
            shape = _box(plan, box.unit, rank, (x, top, box_width, lane))
            words = ""
            if first:
                words = about(plan, box) if merged else f"{short_text(box.unit.name)}: {size(box.unit.bytes_at_rest)}"
            parts.append(_group(numbers[box.unit.order], words, shape))
        first = False
        top += lane + LANE_GAP
    brackets = _brackets(boxes, places, top)
    if brackets:
        parts += brackets
        top += PATTERN_ROW
    legend, rows = _legend(plan, boxes, top, width)
    return svg(width, top + LEGEND_ROW * rows, _description(plan, boxes), *parts, *legend, role="group")


def _shown_ranks(plan: WrapPlan) -> list[int | None]:
    """Return the ranks of one replica that have a lane; None stands for those that are left out."""
    ranks = plan.shard if plan.shard > 1 else plan.world_size
    if ranks <= ALL_RANKS:
        return list(range(ranks))
    return [0, 1, None, ranks - 1]


def _places(boxes: Sequence[Box], width: float) -> list[tuple[float, float]]:
    """Return x and width of each box: by its parameters, and at least MIN_BOX."""
    free = width - BOX_GAP * len(boxes)
    widths = [0.0] * len(boxes)
    wide = set(range(len(boxes)))
    while True:  # the boxes that are wide enough share what the others leave
        numel = sum(boxes[index].numel for index in wide) or 1
        left = free - MIN_BOX * (len(boxes) - len(wide))
        narrow = {index for index in wide if left * boxes[index].numel / numel < MIN_BOX}
        if not narrow:
            break
        wide -= narrow
    places, x = [], float(LEFT)
    for index, box in enumerate(boxes):
        widths[index] = left * box.numel / numel if index in wide else MIN_BOX
        places.append((x, widths[index]))
        x += widths[index] + BOX_GAP
    return places


def _box(plan: WrapPlan, unit: Unit, rank: int, frame: tuple[float, float, float, float]) -> str:
    """Return the shapes of a unit in a rank's lane. frame: x, y, width and height in pixels."""
    x, y, width, height = frame
    if not unit.sharded or plan.shard == 1:
        return _filled(unit, x, y, width, height)
    stripe = max(MIN_STRIPE, height / plan.shard)
    stripe_top = y + (height - stripe) * rank / (plan.shard - 1)
    color = FILL["trainable"] if unit.kind is UnitKind.TRAINABLE else FILL["frozen"]
    outline = f'fill="transparent" stroke="{color}" stroke-dasharray="3 2"'
    shapes = f'<path d="M{x + 0.5:.1f} {y + 0.5:.1f}h{width - 1:.1f}v{height - 1:.1f}h{1 - width:.1f}z" {outline}/>'
    if unit.gathers_forward and not unit.reshard_after_forward:
        for low, high in ((y, stripe_top), (stripe_top + stripe, y + height)):
            if high - low > 1:  # upright hatching is one dashed line
                line = f'<path d="M{x:.1f} {(low + high) / 2:.1f}h{width:.1f}" stroke="{color}"'
                shapes += f'{line} stroke-width="{high - low:.1f}" stroke-dasharray="2 3"/>'
    return shapes + _filled(unit, x, stripe_top, width, stripe)


def _filled(unit: Unit, x: float, y: float, width: float, height: float) -> str:
    """Return what a rank stores of a unit; of a mixed one the frozen part is on the left."""
    frozen = width * (1 - unit.trainable_numel / unit.numel)
    shapes = ""
    for left, part, kind in ((x, frozen, "frozen"), (x + frozen, width - frozen, "trainable")):
        if part > 0.05:
            frame = f'x="{left:.1f}" y="{y:.1f}" width="{part:.1f}" height="{height:.1f}"'
            shapes += f'<rect {frame} fill="{FILL[kind]}"/>'
    return shapes


def _group(number: int, words: str, shapes: str) -> str:
    """Return a box of one lane; with words, it takes the keyboard's focus."""
    if not words:
        return f'<g class="mm-b{number}">{shapes}</g>'
    return f'<g class="mm-b{number}" tabindex="0" role="img"><title>{escape(words)}</title>{shapes}</g>'


def _part_names(boxes: Sequence[Box], places: Sequence[tuple[float, float]], width: float) -> list[str]:
    """Return the names of the model's parts over their first boxes, as far as they have room."""
    starts: list[tuple[str, float]] = []
    for box, (x, _) in zip(boxes, places, strict=True):
        name = part_name(box.unit)
        if not starts or starts[-1][0] != name:
            starts.append((name, x))
    names = []
    for (name, x), (_, end) in zip(starts, [*starts[1:], ("", float(width))], strict=True):
        if width_of(name, FONT) < end - x:
            names.append(text(x, FONT, name, size=FONT))
    return names


def _marks(plan: WrapPlan, boxes: Sequence[Box], places: Sequence[tuple[float, float]], y: float) -> list[str]:
    """Return the marks over the frozen boxes that are wide enough: AUTO's choice, and grad flow."""
    marks = []
    for box, (x, width) in zip(boxes, places, strict=True):
        words = ""
        if plan.fsdp.frozen_policy is FrozenPolicy.AUTO and box.unit.frozen_policy:
            words = LETTERS.get(box.unit.frozen_policy, "")
        if box.unit.kind is not UnitKind.TRAINABLE and box.unit.grad_flow:
            words += MARK
        if words and width_of(words, FONT) <= width + BOX_GAP:
            marks.append(text(x + width / 2, y, words, size=FONT, anchor="middle"))
    return marks


def _brackets(boxes: Sequence[Box], places: Sequence[tuple[float, float]], top: float) -> list[str]:
    """Return a line under each pattern that repeats, with its name or, where it is narrow, the number of times."""
    brackets = []
    for pattern in dict.fromkeys(box.pattern for box in boxes):
        indices = [index for index, box in enumerate(boxes) if box.pattern == pattern]
        if len(boxes[indices[0]].units) == 1:
            continue
        x, (last, last_width) = places[indices[0]][0], places[indices[-1]]
        end = last + last_width
        brackets.append(f'<path d="M{x:.1f} {top - 3:.1f}v3H{end:.1f}v-3" fill="none" stroke="currentColor"/>')
        name = pattern_name([boxes[index] for index in indices])
        for words in (name, f"{len(boxes[indices[0]].units)} ×"):
            if width_of(words, FONT) <= end - x + 16:
                brackets.append(text((x + end) / 2, top + 13, words, size=FONT, anchor="middle"))
                break
    return brackets


def _legend(plan: WrapPlan, boxes: Sequence[Box], top: float, width: float) -> tuple[list[str], int]:
    """Return the legend of what occurs, from `top` on, and its number of rows."""
    units = [box.unit for box in boxes]
    sharded = [unit for unit in units if unit.sharded and plan.shard > 1]
    sample = '<path d="M{x} {y}h11v11h-11z" fill="none" stroke="currentColor" stroke-dasharray="3 2"/>'
    hatched = '<path d="M{x} {middle}h11" stroke="currentColor" stroke-width="11" stroke-dasharray="2 3"/>'
    entries: list[tuple[str, str]] = []
    for kind, other in (("frozen", UnitKind.TRAINABLE), ("trainable", UnitKind.FROZEN)):
        if any(unit.kind is not other for unit in units):
            entries.append((f'<rect x="{{x}}" y="{{y}}" width="11" height="11" fill="{FILL[kind]}"/>', kind))
    if sharded:
        entries.append((sample, "on other ranks: gathered, used, freed"))
    if any(unit.gathers_forward and not unit.reshard_after_forward for unit in sharded):
        entries.append((hatched, "gathered once, kept for backward"))
    if any(unit.kind is not UnitKind.TRAINABLE and unit.grad_flow for unit in units):
        entries.append(("", f"{MARK} gradients pass through"))
    if plan.fsdp.frozen_policy is FrozenPolicy.AUTO:
        entries.append(("", "AUTO chose: S shard, K keep, R replicate"))
    if sharded and plan.shard > ALL_RANKS:
        entries.append(("", f"a filled stripe is 1/{plan.shard}"))
    if plan.replicate > 1 and plan.shard > 1:
        entries.append(("", f"× {plan.replicate} groups of {plan.shard} ranks, all alike"))
    legend, x, row = [], 0.0, 0
    for shape, words in entries:
        needed = (17 if shape else 0) + 1.05 * width_of(words, FONT)
        if x + needed > width and x > 0:
            x, row = 0.0, row + 1
        y = top + LEGEND_ROW * row
        legend.append(shape.format(x=x + 0.5, y=y + 3.5, middle=y + 9))
        legend.append(text(x + (17 if shape else 0), y + 13, words, size=FONT))
        x += needed + 14
    return legend, row + 1


def _description(plan: WrapPlan, boxes: Sequence[Box]) -> str:
    """Return the picture in a sentence."""
    units = sum(len(box.units) for box in boxes)
    rest = sum(unit.bytes_at_rest for unit in plan.units)
    whole = sum(unit.bytes_at_rest * (plan.shard if unit.sharded else 1) for unit in plan.units)
    share = f"{rest / whole:.0%}" if whole else "nothing"
    return f"What each of {plan.world_size} ranks holds between steps: {share} of {units} units, by {plan.backend}"
