"""The units of a plan as boxes that both pictures share: equal layers that repeat are one box, with a number."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ....core.plan import Unit, UnitKind, WrapPlan
from ....params.in_words import count, size

MAX_BOXES = 24
"""Most units that are drawn one by one: in a plan of more, patterns that repeat are merged."""
MIN_SAVED = 4
"""Boxes that a merge must save: fewer units are drawn as they are, which takes less than what opens a pattern."""
MAX_NAME = 64
MAX_PATTERN = 8
"""Units in a pattern: with cross-attention before every fourth layer, five repeat."""


@dataclass(frozen=True)
class Box:
    """One unit, or the equal units at one place of a pattern that repeats."""

    units: tuple[Unit, ...]
    pattern: int
    """Index of its pattern; boxes of one pattern stand side by side."""

    @property
    def unit(self) -> Unit:
        """The first of its units; the others are like it."""
        return self.units[0]

    @property
    def numel(self) -> int:
        """Parameters of all its units."""
        return sum(unit.numel for unit in self.units)


def unit_boxes(plan: WrapPlan, *, merged: bool = True) -> list[Box]:
    """Return the boxes of all units that have parameters, in the order of the forward.

    merged: merge patterns that repeat in a plan of more than MAX_BOXES units.
    """
    units = [unit for unit in plan.units if unit.numel]
    looks = [_look(unit) for unit in units]
    boxes: list[Box] = []
    start = pattern = 0
    while start < len(units):
        length, times = 1, 1
        if merged and len(units) > MAX_BOXES:
            length, times = _longest_repetition(looks[start:])
        for place in range(start, start + length):
            boxes.append(Box(tuple(units[place : start + length * times : length]), pattern))
        start += length * times
        pattern += 1
    return boxes


def _look(unit: Unit) -> Hashable:
    """Return all that equal units share: what the pictures show, and the name without its numbers."""
    gathers = unit.gathers_forward, unit.gathers_backward
    kept = unit.sharded, unit.reshard_after_forward, unit.grad_flow, unit.recomputed
    return unit.kind, unit.frozen_policy, gathers, kept, unit.numel, re.sub(r"\d+", "#", unit.name)


def _longest_repetition(looks: Sequence[Hashable]) -> tuple[int, int]:
    """Return (length, times) of the pattern at the start that covers most units; (1, 1) if none is worth a merge."""
    best = (1, 1)
    for length in range(1, MAX_PATTERN + 1):
        times = 1
        while list(looks[length * times : length * (times + 1)]) == list(looks[:length]):
            times += 1
        if length * (times - 1) >= MIN_SAVED and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def box_of_unit(boxes: Sequence[Box]) -> dict[int, int]:
    """Return the index of its box by the order of a unit."""
    indices = {}
    for index, box in enumerate(boxes):
        for unit in box.units:
            indices[unit.order] = index
    return indices


def short_text(name: str) -> str:
    """Return a name of at most MAX_NAME letters: of a longer one the beginning and the end."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[-half:]}"


def about(plan: WrapPlan, box: Box) -> str:
    """Return a box in words: its name, its bytes, and why it is gathered as it is."""
    unit, share = box.unit, "all of it"
    if unit.sharded and plan.shard > 1:
        share = f"1/{plan.shard} of it"
    return f"{name_of(box)}; a rank holds {share}, {size(unit.bytes_at_rest)}. {_why(unit)}"


def name_of(box: Box) -> str:
    """Return the name of a box, its kind, its policy and its parameters."""
    unit, times = box.unit, len(box.units)
    name = short_text(unit.name)
    if times > 1:
        name = f"{name} and {times - 1} more like it, each"
    policy = f" {unit.frozen_policy}," if unit.frozen_policy else ""
    return f"{name}: {unit.kind},{policy} {count(unit.numel)} parameters"


def _why(unit: Unit) -> str:
    """Return how often a unit is gathered, with the reason."""
    if not unit.sharded:
        words = "Nothing is gathered: every rank has the whole unit."
        if unit.reduced_bytes:
            words += f" Its gradients of {size(unit.reduced_bytes)} are summed over the ranks."
        return words
    words = f"Gathered {_times(unit.gathers_forward)} in forward ({size(unit.unsharded_bytes)})"
    if unit.kind is not UnitKind.FROZEN:
        backward = "its gradients are computed"
    elif unit.grad_flow:
        backward = "gradients pass through it to what trains before it"
    elif unit.recomputed:
        backward = "its forward runs again there"
    else:
        return f"{words} and not in backward, which does not need it."
    if unit.gathers_backward:
        words += f" and {_times(unit.gathers_backward)} in backward, where {backward}"
    else:
        words += f" and kept for backward, where {backward}"
    if unit.reduced_bytes:
        words += f"; then {size(unit.reduced_bytes)} of gradients are reduced"
    return f"{words}."


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
