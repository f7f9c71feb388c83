"""Memory events of a step at another size of its micro-batch, read off two recordings.

As long as the same operators run, what is held after each allocation is linear in the batch. A peak between two events
is not: it is the largest of these levels, and another operator may hold most in a larger batch. So lines are drawn
through the levels, and the largest is taken at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from ..core.plan import MemoryEvent
from .memory_events import Recording


class Line(NamedTuple):
    """A straight line through a value at two sizes."""

    low: int
    low_value: int
    high: int
    high_value: int

    def at(self, n: int) -> int:
        """Return the value at another size."""
        rise = (self.high_value - self.low_value) * (n - self.high)
        return self.high_value + rise // (self.high - self.low)


class Lines:
    """Straight lines through the levels of one step at two sizes of its micro-batch, such as 2 and 4 samples."""

    def __init__(self, low: int, first: Recording, high: int, second: Recording) -> None:
        self._events: list[tuple[MemoryEvent, dict[str, list[Line]]]] = []
        levels, later_levels = first.levels, second.levels
        parts = zip(levels.parts(), later_levels.parts(), strict=True)
        events = zip(first.memory_events, second.memory_events, strict=True)
        for (event, later_event), (part, later_part) in zip(events, parts, strict=True):
            operators, later_operators = levels.operators[part], later_levels.operators[later_part]
            lines = {}
            for name in ("held", "without_grads"):
                values, later_values = getattr(levels, name)[part], getattr(later_levels, name)[later_part]
                pairs = aligned(operators, values, later_operators, later_values)
                lines[name] = [Line(low, a, high, b) for a, b in dict.fromkeys(pairs)]
            for name in ("allocated", "grads"):
                lines[name] = [Line(low, getattr(event, name), high, getattr(later_event, name))]
            self._events.append((event, lines))

    def at(self, n: int) -> tuple[MemoryEvent, ...]:
        """Return the memory events of a step of another size."""
        events = []
        for event, lines in self._events:
            held, without_grads, allocated, grads = (max(line.at(n) for line in some) for some in lines.values())
            events.append(MemoryEvent(event.event, event.unit, held, without_grads, allocated, grads))
        return tuple(events)


def aligned(
    operators: list[Any], values: Sequence[int], later_operators: list[Any], later_values: Sequence[int]
) -> list[tuple[int, int]]:
    """Return pairs of the levels of one part of a step at two sizes, each of the same operator.

    Where the larger size runs a loop more often, such as one over pieces of the loss or over pictures, what comes
    before and after it is paired one by one, and of its rounds the largest level of each operator.
    """
    if operators == later_operators:
        return list(zip(values, later_values, strict=True))
    shorter = min(len(operators), len(later_operators))
    same_before = _same(operators, later_operators)
    same_after = _same(operators[::-1], later_operators[::-1])
    # Rounds of a loop are alike: both ways, all rounds of the smaller size look as if they came before or after it.
    before = min(same_before, shorter - same_after) if same_before + same_after > shorter else same_before
    after = min(same_after, shorter - same_before) if same_before + same_after > shorter else same_after
    pairs = list(zip(values[:before], later_values[:before], strict=True))
    pairs += zip(values[len(values) - after :], later_values[len(later_values) - after :], strict=True)
    rounds = _largest(operators, values, before, after)
    later_rounds = _largest(later_operators, later_values, before, after)
    return pairs + [(rounds[operator], later_rounds[operator]) for operator in rounds if operator in later_rounds]


def _same(some: list[Any], others: list[Any]) -> int:
    """Return how many operators are the same from the beginning on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(some, others, strict=False)))


def _largest(operators: list[Any], values: Sequence[int], before: int, after: int) -> dict[Any, int]:
    """Return the largest level of each operator between so many levels at the beginning and at the end."""
    largest: dict[Any, int] = {}
    for operator, value in list(zip(operators, values, strict=True))[before : len(operators) - after]:
        largest[operator] = max(value, largest.get(operator, value))
    return largest
