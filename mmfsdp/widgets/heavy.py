"""torch and friends are imported by one thread at a time: transformers' lazy modules break when two do it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..params import RunParams

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..plan import WrapPlan

alone = threading.RLock()
"""Held while something heavy is imported, or built for the first time."""
_counting = threading.Lock()


def planned(params: RunParams) -> Iterator[tuple[WrapPlan, Estimate]]:
    """The plan of a run and its cost, from any thread; where activations are not known yet, first without, then with.

    Raises ValueError for what cannot be planned.
    """
    with alone:
        from ..preview import previews

        found = previews(params)
        first = next(found)
    yield first
    with _counting:
        yield from found
