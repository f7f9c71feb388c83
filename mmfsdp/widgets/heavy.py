"""torch and friends are imported by one thread at a time: transformers' lazy modules break when two do it at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..loading import collector_paused
from ..params import RunParams

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..plan import WrapPlan

_importing = threading.RLock()
_counting = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """For what imports something heavy, or builds it for the first time."""
    with _importing, collector_paused():
        yield


def planned(params: RunParams) -> Iterator[tuple[WrapPlan, Estimate]]:
    """The plan of a run and its cost, from any thread; where activations are not known yet, first without, then with.

    Raises ValueError for what cannot be planned.
    """
    with alone():
        from ..preview import previews

        found = previews(params)
        first = next(found)
    yield first
    with _counting:
        yield from found
