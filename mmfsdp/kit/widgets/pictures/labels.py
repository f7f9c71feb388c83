"""Place names side by side in a row, each as near as it comes to what it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..markup import width_of

FONT = 12
LABEL_GAP = 12
"""Pixels between two names."""
WIDER = 1.08
"""Letters of a page's font are wider than `width_of` says, at most by this factor in those that were tried."""


class Label(NamedTuple):
    """A name of something in a picture."""

    words: tuple[str, ...]
    """The name, and shorter ones that stand for it where there is no room."""
    start: float
    end: float
    """Pixels between which it lies in the picture."""
    anchor: float
    """Place of a name that has room: 0 for one that begins at the start, 0.5 for one in the middle."""
    weight: float
    """Size of what it names: of names that do not have room together, the smallest is shortened first."""

    @property
    def middle(self) -> float:
        """The middle of what it names."""
        return (self.start + self.end) / 2

    def preferred(self, width: float) -> float:
        """Return the left edge of a name of this width where nothing else is in its way."""
        return self.start + self.anchor * (self.end - self.start - width)

    def is_beside(self, left: float) -> bool:
        """Return True if a name whose left edge is here does not begin at what it names: a line leads to that."""
        return left >= self.end


def placed(labels: Sequence[Label], width: float) -> list[tuple[Label, str, float]]:
    """Return the labels with the words that have room in a row of this width, and their left edges, in pixels.

    No two overlap. Labels are in the order of what they name. One that cannot be shortened any more is left out.
    """
    shown = {index: 0 for index in range(len(labels))}  # index of a label -> index of its words

    def widths() -> dict[int, float]:
        return {index: WIDER * width_of(labels[index].words[length], FONT) for index, length in shown.items()}

    while sum(widths().values()) + LABEL_GAP * (len(shown) - 1) > width:
        least = min(shown, key=lambda index: (shown[index], labels[index].weight))
        shown[least] += 1
        if shown[least] == len(labels[least].words):
            del shown[least]
    lefts: dict[int, float] = {}
    free = 0.0
    for index, wide in widths().items():  # each to the right of the one before it
        lefts[index] = max(free, labels[index].preferred(wide))
        free = lefts[index] + wide + LABEL_GAP
    limit = width
    for index, wide in reversed(widths().items()):  # and back where that leaves the row
        lefts[index] = min(lefts[index], limit - wide)
        limit = lefts[index] - LABEL_GAP
    return [(labels[index], labels[index].words[length], lefts[index]) for index, length in shown.items()]
