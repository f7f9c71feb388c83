"""Levels of memory: bytes held after each allocation of a micro-step. Their largest are the peaks of its events."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class Levels:
    """Bytes of activations and gradients that a micro-step holds after each allocation, in order."""

    operators: list[Any] = field(default_factory=list)
    """That allocated; None at the beginning of a part of the step, where what came before is held."""
    held: array[int] = field(default_factory=partial(array, "q"))
    """Bytes."""
    without_grads: array[int] = field(default_factory=partial(array, "q"))
    """Those of them that are not parameters' gradients."""
    ends: list[int] = field(default_factory=list)
    """Number of levels up to each event."""

    def add(self, operator: Any, held: int, without_grads: int) -> None:
        """Add a level."""
        self.operators.append(operator)
        self.held.append(held)
        self.without_grads.append(without_grads)

    def end(self) -> tuple[int, int]:
        """End the part of the step before an event. Returns its largest levels: of all bytes, and without gradients."""
        part = slice(self.ends[-1] if self.ends else 0, len(self.held))
        self.ends.append(len(self.held))
        return max(self.held[part]), max(self.without_grads[part])

    def parts(self) -> Iterator[slice]:
        """Yield the places of the levels before each event."""
        start = 0
        for end in self.ends:
            yield slice(start, end)
            start = end
