"""even_batches: ranks with different numbers of batches to evaluate get an error, and need not wait for a time-out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from ..params import ParamError
from .collectives import gather_through_store

T = TypeVar("T")
FIX = (
    "every rank must evaluate as many batches as the others, since each forward gathers weights from all: let the "
    "sampler drop or pad the last ones (DistributedSampler), or evaluate inside keep_gathered(model)"
)


def even_batches(batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches of a rank, while all ranks have one. Every rank must call it.

    Their numbers are compared once where all have a length, and else before each batch; without a collective.

    Raises:
        ParamError: If ranks have different numbers of batches, on all ranks, with the numbers.
    """
    lengths = gather_through_store(length_of(batches))
    if None not in lengths:
        stop_if_different(lengths, "")
        yield from batches
        return
    done, rest = 0, iter(batches)
    while True:
        batch = next(rest, END)
        goes_on = gather_through_store(batch is not END)
        if not any(goes_on):
            return
        stop_if_different([done + has_one for has_one in goes_on], "at least ")
        done += 1
        yield batch  # type: ignore[misc]


END = object()


def length_of(batches: Iterable[object]) -> int | None:
    """Return the number of batches; None if it is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:  # a generator, or the loader of a stream
        return None


def stop_if_different(numbers: list[int], more: str) -> None:
    """Raise ParamError if ranks have different numbers. more: words before the largest, if it is not the last word."""
    fewest, most = min(numbers), max(numbers)
    if fewest == most:
        return
    has_fewest, has_most = numbers.index(fewest), numbers.index(most)
    words = f"rank {has_fewest} has {fewest} batches to evaluate, rank {has_most} {more}{most}"
    raise ParamError("batches", f"{words}; {FIX}")
