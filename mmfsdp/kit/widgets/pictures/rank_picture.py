"""Draw what each rank holds between steps: a lane for each rank, a box for each unit."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from ....core.plan import Unit, UnitKind, WrapPlan
from ....params import FrozenPolicy
from ..markup import svg, text, width_of
from ..style import FILL
from .labels import FONT, Label, placed
from .unit_boxes import Box, about, name_of, unit_boxes
from .unit_names import part_names, pattern_name, unit_names

WIDTH = 760
"""Pixels. No picture is scaled down in a cell of JupyterLab at 1280 pixels with its side bar open."""
LEFT = 62
"""Pixels at which the lanes begin, after the names of the ranks."""
ALL_RANKS = 4
"""Of more ranks, only the first, the second and the last are drawn: with a lane for each, a stripe is a hair."""
LANES_HEIGHT, MIN_LANE, MAX_LANE, LANE_GAP = 80, 13, 34, 5
MIN_BOX, MIN_STRIPE, BOX_GAP = 3.0, 3.0, 2.0
PART_ROW = MARK_ROW = PATTERN_ROW = LEGEND_ROW = 17
SKIPPED_ROW = 14
LEADER_ROW, LEGEND_GAP = 8, 12
MARK = "∇"
"""Of a frozen unit that gradients pass through."""


class Lanes:
    """The layout of a picture of the ranks: where each box and each lane stands, in pixels."""

    def __init__(self, plan: WrapPlan, width: int) -> None:
        self.plan = plan
        self.boxes = unit_boxes(plan)
        self.names = unit_names(self.boxes)
        # A picture of hundreds of boxes is wider.
        self.width = max(width, LEFT + int(len(self.boxes) * (MIN_BOX + BOX_GAP)) + 60)
        self.places = places_of(self.boxes, self.width - LEFT)
        """x and width of each box."""
        self.marks = _marks(plan, self.boxes, self.places, PART_ROW + FONT)
        self.part_names = placed(_part_labels(self.boxes, self.places), self.width)
        self.top = PART_ROW
        if self.marks:
            self.top += MARK_ROW
        elif any(label.is_beside(left) for label, _, left in self.part_names):
            self.top += LEADER_ROW
        ranks = _shown_ranks(plan)
        lanes = sum(rank is not None for rank in ranks)
        free = LANES_HEIGHT - LANE_GAP * (lanes - 1) - SKIPPED_ROW * (len(ranks) - lanes)
        self.lane = min(MAX_LANE, max(MIN_LANE, free / lanes))
        self.tops: list[tuple[int | None, float]] = []
        """Rank and y of each lane; None stands for those that are left out."""
        y: float = self.top
        for rank in ranks:
            self.tops.append((rank, y))
            y += SKIPPED_ROW if rank is None else self.lane + LANE_GAP
        self.bottom = y

    def pattern_name(self, indices: Sequence[int]) -> str:
        """Return the name of the pattern with the boxes of these indices."""
        return pattern_name([self.boxes[index] for index in indices], [self.names[index] for index in indices])


def rank_picture(
    plan: WrapPlan,
    *,
    width: int = WIDTH,
    lanes: Lanes | None = None,
    beneath: Sequence[str] = (),
    above: Sequence[str] = (),
) -> str:
    """Return the units of each rank as SVG: what it stores is filled, what other ranks store is a dashed outline.

    A box has the width of its parameters; patterns that repeat are one box each. Boxes have the classes mm-b0, mm-b1,
    ... and take the keyboard's focus. lanes: the layout, if the picture stands beneath the controls that open its
    patterns; these take the focus then. beneath, above: shapes that lie beneath those of the units, and above them.
    """
    opens = lanes is not None
    lanes = lanes or Lanes(plan, width)
    boxes, places, top, bottom = lanes.boxes, lanes.places, lanes.top, lanes.bottom
    parts = _part_names(lanes) + lanes.marks
    shapes = Shapes(plan, lanes.lane)
    for rank, y in lanes.tops:
        if rank is None:
            parts.append(text(LEFT, y + 8, "⋮", size=FONT))
            continue
        parts.append(text(LEFT - 8, y + lanes.lane / 2 + 4, f"rank {rank}", size=FONT, anchor="end"))
        for box, (x, box_width) in zip(boxes, places, strict=True):
            shapes.add(box.unit, rank, x, y, box_width)
    parts += [*beneath, *shapes.paths(), *above]
    for number, (box, (x, box_width)) in enumerate(zip(boxes, places, strict=True)):
        has_focus = not (opens and len(box.units) > 1)
        words = name_of(box) if opens else about(plan, box)  # the rest stands beneath the picture
        parts.append(place(number, words, (x, top, box_width, bottom - top - LANE_GAP), has_focus))
    brackets = _brackets(lanes)
    legend, rows = _legend(plan, boxes, bottom + (PATTERN_ROW if brackets else 0), lanes.width)
    height = bottom + (PATTERN_ROW if brackets else 0) + LEGEND_ROW * rows
    return svg(lanes.width, height, _description(plan, boxes), *parts, *brackets, *legend, role="group")


def _shown_ranks(plan: WrapPlan) -> list[int | None]:
    """Return the ranks of one replica that have a lane; None stands for those that are left out."""
    ranks = plan.shard if plan.shard > 1 else plan.world_size
    if ranks <= ALL_RANKS:
        return list(range(ranks))
    return [0, 1, None, ranks - 1]


def places_of(boxes: Sequence[Box], width: float) -> list[tuple[float, float]]:
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


class Shapes:
    """The shapes of units in lanes, of one height, as one path for each look, so that a picture stays small."""

    def __init__(self, plan: WrapPlan, lane: float) -> None:
        self._plan, self._lane = plan, lane
        kinds = ("frozen", "trainable")
        self._outlines, self._hatched = dict.fromkeys(kinds, ""), dict.fromkeys(kinds, "")
        self._filled = dict.fromkeys(kinds, "")

    def add(self, unit: Unit, rank: int, x: float, y: float, width: float) -> None:
        """Add what a rank has of a unit, in a box whose upper left corner is (x, y)."""
        plan, lane = self._plan, self._lane
        if not unit.sharded or plan.shard == 1:
            self._fill(unit, x, y, width, lane)
            return
        kind = "trainable" if unit.kind is UnitKind.TRAINABLE else "frozen"
        self._outlines[kind] += rectangle(x + 0.5, y + 0.5, width - 1, lane - 1)
        if unit.gathers_forward and not unit.reshard_after_forward:  # upright hatching is one dashed line
            self._hatched[kind] += f"M{x:.1f} {y + lane / 2:.1f}h{width:.1f}"
        top, height = stripe_of(plan, rank, lane)
        self._fill(unit, x, y + top, width, height)

    def paths(self) -> list[str]:
        """Return the paths: what is filled covers the hatching, and that the outlines."""
        outline = 'fill="none" stroke="{}" stroke-dasharray="3 2"'
        hatching = f'stroke="{{}}" stroke-width="{self._lane:.1f}" stroke-dasharray="2 3"'
        looks = ((self._outlines, outline), (self._hatched, hatching), (self._filled, 'fill="{}"'))
        paths = []
        for data_of, look in looks:
            for kind, data in data_of.items():
                if data:
                    paths.append(f'<path {look.format(FILL[kind])} d="{data}"/>')
        return paths

    def _fill(self, unit: Unit, x: float, y: float, width: float, height: float) -> None:
        """Add what a rank stores of a unit; of a mixed one the frozen part is on the left."""
        frozen = width * (1 - unit.trainable_numel / unit.numel)
        for left, part, kind in ((x, frozen, "frozen"), (x + frozen, width - frozen, "trainable")):
            if part > 0.05:
                self._filled[kind] += rectangle(left, y, part, height)


def stripe_of(plan: WrapPlan, rank: int, lane: float) -> tuple[float, float]:
    """Return where a rank's part of a sharded unit lies in its lane: pixels from the top, and its height."""
    height = max(MIN_STRIPE, lane / plan.shard)
    return (lane - height) * rank / max(1, plan.shard - 1), height


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as path data; widths and heights are positive."""
    left, top, right, down = (f"{number:.1f}".removesuffix(".0") for number in (x, y, width, height))
    return f"M{left} {top}h{right}v{down}h-{right}z"


def place(number: int, words: str, frame: tuple[float, float, float, float], has_focus: bool = True) -> str:
    """Return the place of a box, which the mouse points at. frame: x, y, width and height in pixels.

    has_focus: it takes the keyboard's focus.
    """
    x, y, width, height = frame
    focus = ' tabindex="0" role="img"' if has_focus else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="transparent"/>'
    return f'<g class="mm-b{number}"{focus}><title>{escape(words)}</title>{shape}</g>'


def _part_labels(boxes: Sequence[Box], places: Sequence[tuple[float, float]]) -> list[Label]:
    """Return the names of the model's parts, over their first boxes."""
    labels: list[Label] = []
    for name, group in groupby(zip(part_names(boxes), boxes, places, strict=True), key=lambda item: item[0]):
        part = list(group)
        (first, _), (last, width) = part[0][2], part[-1][2]
        numel = sum(box.numel for _, box, _ in part)
        labels.append(Label((name,), first, last + width, anchor=0.0, weight=numel))
    return labels


def _part_names(lanes: Lanes) -> list[str]:
    """Return the names of the parts; that of a narrow one may stand beside it, with a line to it."""
    names = []
    for label, words, left in lanes.part_names:
        names.append(text(left, FONT, words, size=FONT))
        if label.is_beside(left):
            names.append(_leader(left + 4, PART_ROW - 2, label.middle, lanes.top - 1))
    return names


def _leader(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a thin line from a name to what it names."""
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" fill="none" stroke="currentColor" stroke-width=".7"/>'


def _marks(plan: WrapPlan, boxes: Sequence[Box], places: Sequence[tuple[float, float]], y: float) -> list[str]:
    """Return the marks over the frozen boxes that are wide enough: AUTO's choice, and grad flow."""
    marks = []
    for box, (x, width) in zip(boxes, places, strict=True):
        words = ""
        if plan.fsdp.frozen_policy is FrozenPolicy.AUTO and box.unit.frozen_policy:
            words = box.unit.frozen_policy[0]
        if box.unit.kind is not UnitKind.TRAINABLE and box.unit.grad_flow:
            words += MARK
        if words and width_of(words, FONT) <= width + BOX_GAP:
            marks.append(text(x + width / 2, y, words, size=FONT, anchor="middle"))
    return marks


def _brackets(lanes: Lanes) -> list[str]:
    """Return a line under each pattern that repeats, with its name or, where names are too many, the number of times.

    The name of a narrow pattern stands beside it, with a line to it.
    """
    boxes, places, top = lanes.boxes, lanes.places, lanes.bottom
    brackets, labels = [], []
    for pattern in dict.fromkeys(box.pattern for box in boxes):
        indices = [index for index, box in enumerate(boxes) if box.pattern == pattern]
        times = len(boxes[indices[0]].units)
        if times == 1:
            continue
        x, (last, last_width) = places[indices[0]][0], places[indices[-1]]
        end = last + last_width
        brackets.append(f'<path d="M{x:.1f} {top - 3:.1f}v3H{end:.1f}v-3" fill="none" stroke="currentColor"/>')
        numel = sum(boxes[index].numel for index in indices)
        labels.append(Label((lanes.pattern_name(indices), f"{times} ×"), x, end, anchor=0.5, weight=numel))
    for label, words, left in placed(labels, lanes.width):
        brackets.append(text(left + width_of(words, FONT) / 2, top + 13, words, size=FONT, anchor="middle"))
        if label.is_beside(left):
            brackets.append(_leader(left + 4, top + 4, label.middle, top))
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
        share = f"{plan.shard - 1}/{plan.shard} " if plan.shard > ALL_RANKS else ""  # few ranks are all in sight
        entries.append((sample, f"{share}on other ranks: gathered, used, freed"))
    if any(unit.gathers_forward and not unit.reshard_after_forward for unit in sharded):
        entries.append((hatched, "gathered once, kept for backward"))
    if any(unit.kind is not UnitKind.TRAINABLE and unit.grad_flow for unit in units):
        entries.append(("", f"{MARK} gradients pass through"))
    if plan.fsdp.frozen_policy is FrozenPolicy.AUTO:
        chosen = [f"{policy[0]} {policy.lower()}" for policy in FrozenPolicy if policy is not FrozenPolicy.AUTO]
        entries.append(("", f"AUTO chose: {', '.join(chosen)}"))
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
        x += needed + LEGEND_GAP
    return legend, row + 1


def _description(plan: WrapPlan, boxes: Sequence[Box]) -> str:
    """Return the picture in a sentence."""
    units = sum(len(box.units) for box in boxes)
    rest = sum(unit.bytes_at_rest for unit in plan.units)
    whole = sum(unit.bytes_at_rest * (plan.shard if unit.sharded else 1) for unit in plan.units)
    share = f"{rest / whole:.0%}" if whole else "nothing"
    return f"What each of {plan.world_size} ranks holds between steps: {share} of {units} units, by {plan.backend}"
