"""Draw one step on a rank: its memory over the events of the step, and the collectives beneath."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import groupby

from ....core.plan import WrapPlan
from ....params.in_words import size
from ....predict.timeline import Moment, Timeline
from ..markup import svg, text, ticks, width_of
from ..style import FILL
from .labels import FONT
from .play_head import PlayHead
from .rank_picture import LEFT, WIDTH, rectangle
from .unit_boxes import box_of_unit, short_text, unit_boxes

MAX_EVENTS = 150
"""A step with more events is drawn in so many columns and twice as many more: least and most of each."""
COLUMNS = 150
MIN_PLACE = 5.0
TOP, HEIGHT, SENT_HEIGHT, LEGEND_ROW = 20, 96, 24, 17
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
AREAS = ("frozen", "trainable", "optimizer", "gathered", "gradients", "buffers")
"""From the bottom to the top."""
NAMES = {
    "frozen": "frozen",
    "trainable": "trainable",
    "optimizer": "optimizer",
    "gathered": "gathered, all-gather",
    "gradients": "gradients, reduction",
    "buffers": "communication buffers",
    "activations": "activations",
}
Column = tuple[float, float, Moment]
"""x and width in pixels, and what is held."""


def step_picture(
    plan: WrapPlan,
    timeline: Timeline,
    *,
    pinned: Timeline | None = None,
    activations: bool = False,
    width: int = WIDTH,
    scale_to: int = 0,
    head: PlayHead | None = None,
) -> str:
    """Return a step as SVG. Both timelines are drawn on one scale; the pinned one is a dashed line.

    activations: draw them, too, over all else. scale_to: bytes that have room below the top, so that pictures drawn one
    after the other have one scale. head: drawn where it stands. The place of a unit has the class of its box, mm-b0,
    mm-b1, ..., as in `rank_picture`.
    """
    areas = _areas(activations)
    columns = _columns(timeline, width)
    pinned_columns = _largest_of_events(pinned, width) if pinned else []
    top = most_drawn(timeline, activations=activations)
    most = max(top, scale_to, most_drawn(pinned, activations=activations) if pinned else 0)
    scale = HEIGHT / (1.06 * most or 1)
    parts = _axis(most, top, scale, width) + _layers(timeline, columns, areas, scale)
    if pinned:
        parts += _pinned_line(pinned, pinned_columns, areas, scale)
    parts += _phases(columns)
    boxes = box_of_unit(unit_boxes(plan))
    parts += _places_of_units(plan, timeline, boxes, width)
    largest = max(_most_sent(timeline), _most_sent(pinned) if pinned else 0)
    parts += _collectives(plan, timeline, boxes, largest, width)
    bottom = TOP + HEIGHT + SENT_HEIGHT + 8
    if head:
        parts.append(head.line(width, TOP, bottom - 2))
    legend, rows = _legend(timeline, areas, bottom, width)
    return svg(width, bottom + LEGEND_ROW * rows, _description(timeline), *parts, *legend)


def most_drawn(timeline: Timeline, *, activations: bool) -> int:
    """Return the most bytes that are drawn at a moment of a step."""
    areas = _areas(activations)
    return max(sum(_stack(timeline, moment, areas)) for moment in timeline.moments)


def _areas(activations: bool) -> tuple[str, ...]:
    return (*AREAS, "activations") if activations else AREAS


def _columns(timeline: Timeline, width: int) -> list[Column]:
    """Return a column for each moment; of many events, the moments of least and most of each of COLUMNS columns."""
    events = timeline.events
    pixels = (width - LEFT) / events
    columns: list[Column] = []
    for event, group in groupby(timeline.moments, key=lambda moment: moment.event):
        moments = list(group)
        for place, moment in enumerate(moments):
            part = pixels / len(moments)
            columns.append((LEFT + event * pixels + place * part, part, moment))
    if events <= MAX_EVENTS:
        return columns
    binned: list[Column] = []
    pixels = (width - LEFT) / COLUMNS
    for place, near in groupby(columns, key=lambda column: int((column[0] - LEFT + 1e-6) / pixels)):
        inside = list(near)
        least = min(inside, key=lambda column: column[2].without_activations)
        most = max(inside, key=lambda column: column[2].without_activations)
        both = sorted((least, most), key=lambda column: column[0])
        for index, (_, _, moment) in enumerate(both):
            binned.append((LEFT + place * pixels + index * pixels / 2, pixels / 2, moment))
    return binned


def _largest_of_events(timeline: Timeline, width: int) -> list[Column]:
    """Return a column for each event, or of many events for each of COLUMNS, with the most that is held in it."""
    events = timeline.events
    number = min(events, COLUMNS)
    pixels = (width - LEFT) / number
    columns: list[Column] = []
    for place, group in groupby(timeline.moments, key=lambda moment: moment.event * number // events):
        moment = max(group, key=lambda moment: moment.without_activations)
        columns.append((LEFT + place * pixels, pixels, moment))
    return columns


def _stack(timeline: Timeline, moment: Moment, areas: Sequence[str]) -> list[int]:
    """Return the bytes of each area at a moment."""
    held = {"frozen": timeline.frozen, "trainable": timeline.trainable, "optimizer": timeline.optimizer}
    held |= {"gathered": moment.gathered, "gradients": moment.gradients, "activations": moment.activations}
    held["buffers"] = timeline.module_buffers + moment.buffers
    return [held[area] for area in areas]


def _layers(timeline: Timeline, columns: Sequence[Column], areas: Sequence[str], scale: float) -> list[str]:
    """Return the areas as stairs, each on top of the one before it.

    Each reaches down to the axis, and the lower ones are drawn over it: half as many corners as with both its edges.
    """
    stacks = [_stack(timeline, moment, areas) for _, _, moment in columns]
    heights = [0.0] * len(columns)
    layers = []
    for index, area in enumerate(areas):
        for place, stack in enumerate(stacks):
            heights[place] += stack[index] * scale
        if any(stack[index] for stack in stacks):
            down = f"V{TOP + HEIGHT}H{LEFT}z"
            layers.append(f'<path d="M{_stairs(columns, heights)}{down}" fill="{FILL[area]}"/>')
    layers.reverse()
    return layers


def _stairs(columns: Sequence[Column], heights: Sequence[float]) -> str:
    """Return a line over the columns as SVG path data: it changes its height between them only."""
    corners: list[tuple[float, float]] = []
    for (x, width, _), height in zip(columns, heights, strict=True):
        y = TOP + HEIGHT - height
        if corners and abs(corners[-1][1] - y) < 0.05:
            corners[-1] = (x + width, corners[-1][1])
            continue
        corners += [(x, y), (x + width, y)]
    (x, y), *others = corners
    data = f"{x:.1f} {y:.1f}"
    for index, (x, y) in enumerate(others):  # level, then upright, in turn
        data += f"V{y:.1f}" if index % 2 else f"H{x:.1f}"
    return data


def _pinned_line(timeline: Timeline, columns: Sequence[Column], areas: Sequence[str], scale: float) -> list[str]:
    """Return the top of the pinned plan's areas as a dashed line: dark dashes on a light line are seen on any area."""
    heights = [sum(_stack(timeline, moment, areas)) * scale for _, _, moment in columns]
    data = f'd="M{_stairs(columns, heights)}" fill="none"'
    halo = f'<path {data} stroke="{FILL["page"]}" stroke-width="3" stroke-opacity=".8"/>'
    line = f'<path class="mm-pinned" {data} stroke="currentColor" stroke-width="1.5" stroke-dasharray="4 3"/>'
    words = "- - pinned plan"
    return [halo + line, text(columns[-1][0], TOP - 7, words, size=FONT, anchor="end")]


def unit_of_bytes(most: float) -> tuple[int, str]:
    """Return the unit in which an axis up to so many bytes is labelled: its bytes, and its name."""
    return next((factor, unit) for factor, unit in UNITS if most >= 2 * factor or factor == 1)


def _axis(most: int, top: int, scale: float, width: int) -> list[str]:
    """Return round numbers of bytes with their lines, and that of the top of the step, as the figures have it."""
    top_y = TOP + HEIGHT - top * scale
    factor, unit = unit_of_bytes(most)
    parts = [text(LEFT - 8, TOP - 7, unit, size=FONT, anchor="end")]
    for value in ticks(0, 1.04 * most / factor, 4):
        y = TOP + HEIGHT - value * factor * scale
        if abs(y - top_y) < FONT:
            continue
        line = f'<path d="M{LEFT} {y:.1f}H{width}" stroke="currentColor" stroke-opacity=".2"/>'
        parts.append(line + text(LEFT - 8, y + 4, f"{value:g}", size=FONT, anchor="end"))
    dashes = 'stroke="currentColor" stroke-dasharray="1 3"'
    line = f'<path d="M{LEFT - 5} {top_y:.1f}H{width}" {dashes}/>'
    parts.append(f'<g class="mm-top">{line}{text(LEFT - 7, top_y + 4, size(top), size=FONT, anchor="end")}</g>')
    return parts


def _phases(columns: Sequence[Column]) -> list[str]:
    """Return a mark where forward and backward begin."""
    parts, end = [], 0.0
    for phase, group in groupby(columns, key=lambda column: column[2].phase):
        x = next(group)[0]
        if x < end:
            continue
        if x > LEFT:
            line = f'<path d="M{x:.1f} {TOP - 16}v{HEIGHT + 16}" stroke="currentColor" stroke-dasharray="2 3"/>'
            parts.append(line)
        parts.append(text(x + 4, TOP - 7, phase, size=FONT))
        end = x + width_of(phase, FONT) + 12
    return parts


def _places_of_units(plan: WrapPlan, timeline: Timeline, boxes: dict[int, int], width: int) -> list[str]:
    """Return what the mouse points at: over the events of one unit a column without color, with its words.

    Those that begin less than MIN_PLACE after the one before have none.
    """
    pixels = (width - LEFT) / (timeline.events)
    parts, last_x = [], -MIN_PLACE
    for (phase, order), group in groupby(timeline.moments, key=lambda moment: (moment.phase, moment.unit)):
        moments = list(group)
        first, end = moments[0].event, moments[-1].event + 1
        x = LEFT + first * pixels
        if order not in boxes or x < last_x + MIN_PLACE:  # a root without parameters has no box
            continue
        last_x = x
        most = timeline.constant + max(moment.without_activations for moment in moments)
        words = f"{phase} of {short_text(plan.units[order].name)}: {size(most)}"
        outline = rectangle(x, TOP, max(MIN_PLACE, (end - first) * pixels), HEIGHT)
        parts.append(f'<path class="mm-b{boxes[order]}" d="{outline}"><title>{escape(words)}</title></path>')
    return ['<g fill="transparent">', *parts, "</g>"]


def _sent(timeline: Timeline) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Return (order of the unit, bytes) of what begins at a place, by kind and place: an event, or one of COLUMNS."""
    events = timeline.events
    number = min(events, COLUMNS) if events > MAX_EVENTS else events
    sent: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for collective in timeline.collectives:
        event = timeline.event_of(collective)
        kind = "all-gather" if collective.kind == "all-gather" else "reduction"
        sent[kind, event * number // events].append((collective.unit, collective.wire_bytes))
    return sent


def _most_sent(timeline: Timeline) -> int:
    """Return the most bytes of one tick."""
    return max((sum(nbytes for _, nbytes in units) for units in _sent(timeline).values()), default=0)


def _collectives(plan: WrapPlan, timeline: Timeline, boxes: dict[int, int], largest: int, width: int) -> list[str]:
    """Return a tick for each place at which collectives begin, as high as the bytes that a rank sends in them."""
    bottom, events = TOP + HEIGHT + 6 + SENT_HEIGHT, timeline.events
    pixels = (width - LEFT) / (COLUMNS if events > MAX_EVENTS else events)
    parts = [text(LEFT - 8, bottom - 8, "sent", size=FONT, anchor="end")]
    parts.append(f'<path d="M{LEFT} {bottom}H{width}" stroke="currentColor"/>')
    ticks_of: dict[str, str] = {"all-gather": "", "reduction": ""}
    for (kind, place), units in _sent(timeline).items():
        total = sum(nbytes for _, nbytes in units)
        height = max(3.0, SENT_HEIGHT * total / (largest or 1))
        classes = " ".join(dict.fromkeys(f"mm-b{boxes[order]}" for order, _ in units if order in boxes))
        words = f"{kind}: {size(total)} sent"
        if events <= MAX_EVENTS:
            names = ", ".join(short_text(plan.units[order].name) for order, _ in units)
            words = f"{kind} of {names}: {size(total)} sent"
        line = f'd="M{LEFT + place * pixels + 1.5:.1f} {bottom}v-{height:.1f}"'
        ticks_of[kind] += f'<path class="{classes}" {line}><title>{escape(words)}</title></path>'
    for kind, color in (("all-gather", FILL["gathered"]), ("reduction", FILL["gradients"])):
        parts.append(f'<g stroke="{color}" stroke-width="3">{ticks_of[kind]}</g>')
    return parts


def _legend(timeline: Timeline, areas: Sequence[str], top: float, width: int) -> tuple[list[str], int]:
    """Return the legend of the areas that occur, and its number of rows."""
    most = [0] * len(areas)
    for moment in timeline.moments:
        most = [max(pair) for pair in zip(most, _stack(timeline, moment, areas), strict=True)]
    legend, x, row = [], float(LEFT), 0
    for area, nbytes in zip(areas, most, strict=True):
        if not nbytes:
            continue
        words = NAMES[area]
        needed = 17 + 1.05 * width_of(words, FONT)
        if x + needed > width:
            x, row = float(LEFT), row + 1
        y = top + LEGEND_ROW * row
        legend.append(f'<rect x="{x:.1f}" y="{y + 3:.1f}" width="11" height="11" fill="{FILL[area]}"/>')
        legend.append(text(x + 17, y + 13, words, size=FONT))
        x += needed + 14
    return legend, row + 1


def _description(timeline: Timeline) -> str:
    """Return the picture in a sentence."""
    kinds: dict[str, int] = defaultdict(int)
    for collective in timeline.collectives:
        kinds[collective.kind] += 1
    calls = ", ".join(f"{number} {kind}s" for kind, number in kinds.items()) or "no collectives"
    return f"One step on a rank: at most {size(timeline.most)} without activations; {calls}"
