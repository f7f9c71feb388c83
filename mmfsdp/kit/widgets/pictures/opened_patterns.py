"""Open a pattern that repeats by a click on its box, or by the space bar, and show each of its units.

A check box without color lies over the boxes of each pattern, and rules of a style sheet show what it opens: no script
is needed, so it works in a notebook, in a report and in an exported page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from ....params.in_words import size
from ..markup import svg
from .rank_picture import BOX_GAP, LANE_GAP, LEFT, MIN_BOX, Lanes, Shapes, places_of, rectangle
from .unit_boxes import Box, name_of, short_text

HEIGHT = 22
MAX_NAMED = 120
"""In a plan of more units, those of an opened pattern are told by the numbers in their names."""
MAX_DRAWN = 300
"""Units of a pattern."""


def patterns_of(boxes: Sequence[Box]) -> dict[int, list[int]]:
    """Return the indices of the boxes of each pattern that repeats."""
    patterns: dict[int, list[int]] = {}
    for index, box in enumerate(boxes):
        if len(box.units) > 1:
            patterns.setdefault(box.pattern, []).append(index)
    return patterns


def fold_names(boxes: Sequence[Box]) -> dict[int, str]:
    """Return a name for each pattern that repeats, by which it stays open when the plan is drawn once more.

    It is the name of the layers, whatever their policy and number: of layers that another policy has split into
    several patterns, the first goes on.
    """
    names: dict[int, str] = {}
    times: Counter[str] = Counter()
    for pattern, indices in patterns_of(boxes).items():
        layers = re.sub(r"\d+", "#", short_text(boxes[indices[0]].unit.name))
        names[pattern] = f"{layers} {times[layers]}"
        times[layers] += 1
    return names


def opening_controls(lanes: Lanes) -> str:
    """Return a check box over each box that stands for several units.

    Whichever opened a pattern grows over all boxes of it, so that a click on any of them closes it again.
    """
    html, folds = "", fold_names(lanes.boxes)
    for pattern, indices in patterns_of(lanes.boxes).items():
        name = lanes.pattern_name(indices)
        left = lanes.places[indices[0]][0]
        end, height = sum(lanes.places[indices[-1]]), lanes.bottom - lanes.top - LANE_GAP
        for index in indices:
            x, width = lanes.places[index]
            frame = f"left:{x:.1f}px;top:{lanes.top}px;width:{width:.1f}px;height:{height:.1f}px"
            what = name_of(lanes.boxes[index])  # the rest stands beneath the picture
            words = escape(f"{what}. Click to see each unit.")
            html += f'<input type="checkbox" class="mm-b{index} mm-open mm-open{pattern}" title="{words}"'
            html += f' aria-label="{escape(name)}: each unit by itself" data-fold="{escape(folds[pattern])}"'
            html += f' style="{frame};--left:{left:.1f}px;--width:{end - left:.1f}px">'
    return html


def opened_patterns(lanes: Lanes, width: int) -> str:
    """Return what each pattern shows when it is opened: its units on the first rank, each as wide as its parameters."""
    plan, boxes = lanes.plan, lanes.boxes
    number = sum(len(box.units) for box in boxes)
    html = ""
    for pattern, indices in patterns_of(boxes).items():
        name = lanes.pattern_name(indices)
        units = [(unit.order, index, unit) for index in indices for unit in boxes[index].units]
        units.sort(key=lambda item: item[0])
        words = f"{name}, each unit by itself on rank 0"
        if len(units) > MAX_DRAWN:
            words += f"; the first {MAX_DRAWN} of {len(units)} are drawn"
            del units[MAX_DRAWN:]
        alone = [Box((unit,), pattern) for _, _, unit in units]
        wide = max(width - LEFT, int(len(alone) * (MIN_BOX + BOX_GAP)) + 60)
        places = places_of(alone, wide)
        shapes, parts = Shapes(plan, HEIGHT), []
        for (_, index, unit), (x, box_width) in zip(units, places, strict=True):
            shapes.add(unit, 0, x, 0, box_width)
            label = short_text(unit.name)
            if number > MAX_NAMED:
                label = " ".join(re.findall(r"\d+", unit.name))
            title = f"<title>{escape(label)}: {size(unit.bytes_at_rest)}</title>"
            outline = rectangle(x, 0, box_width, HEIGHT)
            parts.append(f'<path class="mm-b{index}" tabindex="0" role="img" d="{outline}">{title}</path>')
        places_of_units = ['<g fill="transparent">', *parts, "</g>"]
        picture = svg(LEFT + wide, HEIGHT, words, *shapes.paths(), *places_of_units, role="group")
        scrolled = f'<div class="mm-scroll" tabindex="0" role="group" aria-label="{escape(words)}">{picture}</div>'
        html += f'<div class="mm-opened mm-opened{pattern}"><span>{escape(words)}</span>{scrolled}</div>'
    return html


def opening_rules(boxes: Sequence[Box]) -> str:
    """Return the rules of the style sheet that show what is opened."""
    rules = ""
    for pattern in patterns_of(boxes):
        opened = f".mm-plan:has(.mm-open{pattern}:checked)"
        rules += f"{opened} .mm-opened{pattern}{{display:block}}"
        rules += f"{opened} .mm-open{pattern}:not(:checked){{display:none}}\n"
    return rules
