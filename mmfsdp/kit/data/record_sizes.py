"""The sizes of a source's records, by the processor that encodes them; nothing is decoded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...params import ParamError
from .batch import Sample
from .corrupt import CorruptRecord
from .pictures import headers_only
from .processor import SampleProcessor
from .sample_size import SampleSize
from .sources.stream import IndexedSource, Loaded, Source, load_or_corrupt

TELL_EVERY = 1_000
"""Records between two reports of progress."""


class NoSizes(ValueError):
    """The sizes of a source's records are not known; the text says why."""


def size_of(item: Loaded, processor: SampleProcessor) -> SampleSize | None:
    """Return the size of a record, of one with several right answers the largest; None if it is unusable.

    Raises NoSizes if the processor cannot tell.
    """
    if isinstance(item, CorruptRecord):
        return None
    if not isinstance(item, Sample):
        raise NoSizes("the model's own processor does not say how long its rows become")
    largest: SampleSize | None = None
    for epoch in range(max(len(message.truths) for message in item.messages)):
        try:
            its_size = processor.measure(item.for_epoch(epoch))
        except CorruptRecord:
            continue
        if its_size is None:
            raise NoSizes("the model's own processor does not say how long its rows become")
        if largest is None or its_size.tokens > largest.tokens:
            largest = its_size
    return largest


def needs_lengths(source: Source) -> bool:
    """Return whether a source's order depends on lengths that are not known yet."""
    return isinstance(source, IndexedSource) and source.arrange is not None and source.lengths is None


def lengths_of(
    source: IndexedSource,
    processor: SampleProcessor,
    *,
    part: slice = slice(None),
    tell: Callable[[float], None] | None = None,
) -> np.ndarray:
    """Return (N,) int64 the tokens of each record of a source, 0 for one that cannot be used.

    Args:
        source: The records.
        processor: With the source's own max_length.
        part: Only these are measured; all others are 0.
        tell: Is called with the share that is done, from time to time.

    Raises:
        NoSizes: If the processor cannot tell a size.
    """
    assert source.length is not None
    lengths = np.zeros(source.length, np.int64)
    indices = range(source.length)[part]
    with headers_only():
        for done, index in enumerate(indices):
            if tell is not None and done % TELL_EVERY == 0:
                tell(done / len(indices))
            its_size = size_of(load_or_corrupt(source.load, index), processor)
            lengths[index] = its_size.tokens if its_size else 0
    return lengths


def add_lengths(
    source: Source, processor: SampleProcessor, place: str, measure: Callable[..., np.ndarray] = lengths_of
) -> None:
    """Measure the lengths that a source's order depends on, unless they are known or not needed.

    Args:
        source: The records to train on.
        processor: With the source's own max_length.
        place: The source's name in the parameters.
        measure: Returns what `lengths_of` does; ranks share the work.

    Raises:
        ParamError: If the processor cannot tell a size.
    """
    if not needs_lengths(source):
        return
    assert isinstance(source, IndexedSource) and source.arrange is not None
    try:
        source.lengths = measure(source, processor)
    except NoSizes as error:
        field = "by_length" if source.arrange.by_length else "even_ranks"
        raise ParamError(f"{place}.{field}", f"needs the length of every record: {error}; unset it") from None
