"""Sizes of a run's records, and its batches by them: the largest, padding, and how long ranks wait for each other.

Nothing is decoded: a text is tokenized, and a picture's size is in its header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ...core.plan import WrapPlan
from ...params import ParamError, RunParams
from ...predict.data_figures import BatchFigures, DataFigures, RecordFigures
from ...predict.memory import Memory
from ..data.corrupt import printable
from ..data.pictures import headers_only
from ..data.processor import SampleProcessor
from ..data.record_sizes import NoSizes, add_lengths, needs_lengths, size_of
from ..data.sample_size import SampleSize
from ..data.sources.arrange import deal_evenly
from ..data.sources.stream import DataSlice, IndexedSource, Loaded, Source, load_or_corrupt

RECORDS = 1_000
"""Records that are looked at before a launch, unless all are asked for: it takes about a second."""
MAX_POSITIONS = 1 << 22
"""Positions of the stream whose batches are compared; beyond them a run's order is not looked at."""
LONGEST = 3
"""Records that are named of a batch."""


@dataclass(frozen=True)
class SizedOrder:
    """The sizes of a source's records, in the order in which a run takes them."""

    sizes: dict[int, SampleSize]
    """By the record's index; of a source without an index, by its place in the stream. Unusable ones are left out."""
    order: np.ndarray
    """(P,) the record at each position from the beginning of the stream on."""
    records: int
    """Records that were looked at."""
    of: int | None
    """All records; None if unknown."""
    covers_run: bool
    """The positions are all that the run takes."""

    def of_records(self, name: str, records: np.ndarray) -> np.ndarray:
        """Return a field of the size of each record, in the shape of `records`; 0 for an unusable one."""
        values = np.zeros(1 + int(self.order.max(initial=0)), np.int64)
        for record, its_size in self.sizes.items():
            values[record] = getattr(its_size, name)
        return values[records]


def sized_order(source: Source, processor: SampleProcessor, positions: int, most: int | None) -> SizedOrder:
    """Return the sizes of a source's records, by the processor that encodes them.

    Args:
        source: The records to train on.
        processor: With the source's own max_length.
        positions: Positions that the run takes.
        most: The most records to look at, those that come first; None for all of them.

    Raises:
        NoSizes: If the processor cannot tell a size, or no record can be used.
        ParamError: If the order depends on more records than may be looked at.
    """
    looked = min(positions, MAX_POSITIONS)
    length = source.length if isinstance(source, IndexedSource) else None
    if isinstance(source, IndexedSource) and needs_lengths(source):
        assert length is not None
        if most is not None and length > most:
            words = f"by_length and even_ranks need the length of all {length:,} records: `mmfsdp plan --all-data`"
            raise ParamError(source.field, f"{words} reads them")
        add_lengths(source, processor, source.field)
    if isinstance(source, IndexedSource) and length is not None:
        epochs = [source.order(epoch) for epoch in range(-(-looked // length))]
        order = np.concatenate(epochs)[:looked]
        if most is not None and len(np.unique(order)) > most:
            order = order[:most]
        indices = np.unique(order).tolist()
        loaded: Iterator[Loaded] = (load_or_corrupt(source.load, index) for index in indices)
    else:
        order = np.arange(looked if most is None else min(looked, most))
        indices = order.tolist()
        first = source.batches(DataSlice(batch_size=1))
        loaded = (batch[0] for batch in islice(first, len(indices)))
    sizes = {}
    with headers_only():
        for index, item in zip(indices, loaded, strict=False):
            its_size = size_of(item, processor)
            if its_size is not None:
                sizes[index] = its_size
    if not sizes:
        raise NoSizes("no record can be used")
    return SizedOrder(sizes, order, len(indices), length, len(order) == positions)


@dataclass(frozen=True)
class SizedBatches:
    """The batches of a source by the sizes of their records: S micro-steps, W ranks, B samples in a batch."""

    place: str
    sized: SizedOrder
    records: np.ndarray
    """(S, W, B) the record at each place."""
    tokens: np.ndarray
    """(S, W, B) length of each row, 0 for a record that is left out."""
    visual: np.ndarray
    """(S, W, B) tokens of its pictures."""

    @classmethod
    def of(
        cls, place: str, sized: SizedOrder, *, batch_size: int, ranks: int, even_ranks: bool = False
    ) -> SizedBatches:
        """Return the batches as they are dealt to the ranks. Raises NoSizes if there is none for each rank."""
        in_step = batch_size * ranks
        steps = len(sized.order) // in_step
        if not steps:
            raise NoSizes(f"{len(sized.order):,} records are fewer than a micro-step takes")
        records = sized.order[: steps * in_step].reshape(steps, in_step)
        tokens, visual = sized.of_records("tokens", records), sized.of_records("visual", records)
        dealt = np.arange(in_step).reshape(1, ranks, batch_size).repeat(steps, 0)
        if even_ranks:
            dealt = deal_evenly(tokens, ranks)
        places = dealt.reshape(steps, in_step)
        arrays = [np.take_along_axis(each, places, 1).reshape(dealt.shape) for each in (records, tokens, visual)]
        return cls(place, sized, *arrays)

    @property
    def padded(self) -> np.ndarray:
        """Return (S, W) the positions of each batch, padding included."""
        return (self.tokens > 0).sum(-1) * self.tokens.max(-1)

    def largest(self, first: np.ndarray) -> list[tuple[int, int]]:
        """Return micro-step and rank of the batches that may have the highest peak: by their positions, by pictures.

        first: (S,) whether a micro-step is the first one of a step, which holds no gradients of earlier ones. A batch
        of one is left out if another micro-step has one as large.
        """
        padded, visual = self.padded, self.visual.sum(-1)
        found: list[tuple[int, int]] = []
        for some in (~first, first):
            for load, then in ((padded, visual), (visual, padded)):
                if not some.any():
                    continue
                place = _argmax(np.where(some[:, None], load, -1), then)
                if not any(padded[place] <= padded[other] and visual[place] <= visual[other] for other in found):
                    found.append(place)
        return found

    def records_of(self, step: int, rank: int) -> list[SampleSize]:
        """Return the sizes of the usable records of a batch."""
        chosen = self.records[step, rank].tolist()
        return [self.sized.sizes[record] for record in chosen if record in self.sized.sizes]

    def largest_possible(self) -> list[list[int]]:
        """Return the records of the batches that may have the highest peak of any: by positions, by pictures."""
        batch_size, sizes = self.tokens.shape[-1], self.sized.sizes
        by_positions = sorted(sizes, key=lambda each: (sizes[each].tokens, sizes[each].visual), reverse=True)
        by_pictures = sorted(sizes, key=lambda each: (sizes[each].visual, sizes[each].tokens), reverse=True)
        found = [by_positions[:batch_size], by_pictures[:batch_size]]
        visual = [sum(sizes[each].visual for each in records) for records in found]
        return found if visual[1] > visual[0] else found[:1]

    def figures(self, records: Sequence[SampleSize], **where: Any) -> BatchFigures:
        """Return the figures of a batch. where: its step and rank."""
        longest = sorted(records, key=lambda each: (each.tokens, each.visual), reverse=True)[:LONGEST]
        named = tuple(RecordFigures(printable(each.label), each.tokens, each.pictures) for each in longest)
        visual = sum(each.visual for each in records)
        return BatchFigures(self.place, len(records), longest[0].tokens if longest else 0, visual, named, **where)


def _argmax(load: np.ndarray, then: np.ndarray) -> tuple[int, int]:
    """Return where `load` (S, W) is largest; of several such places, where `then` is."""
    step, rank = np.unravel_index(int(np.where(load == load.max(), then, -1).argmax()), load.shape)
    return int(step), int(rank)


def shares(batches: Sequence[SizedBatches], micro_steps: int) -> tuple[float, float]:
    """Return the share of all positions that are padding, and the share of a step that a rank waits on average.

    Compute grows with the positions of a batch. micro_steps: after so many the ranks wait for each other.
    """
    positions = tokens = mean = most = 0.0
    for each in batches:
        padded = each.padded
        positions, tokens = positions + float(padded.sum()), tokens + float(each.tokens.sum())
        steps = max(1, len(padded) // micro_steps)
        together = padded[: steps * micro_steps].reshape(steps, -1, padded.shape[1]).sum(axis=1)
        mean, most = mean + float(together.mean(axis=1).sum()), most + float(together.max(axis=1).sum())
    return 1 - tokens / positions if positions else 0.0, 1 - mean / most if most else 0.0


def data_figures(
    params: RunParams,
    plan: WrapPlan,
    batches: Sequence[SizedBatches],
    largest: BatchFigures,
    possible: BatchFigures,
    possible_peak: Memory,
) -> DataFigures:
    """Return what the sizes of a run's records say of its batches.

    Args:
        params: The run.
        plan: Its plan, which says when ranks wait for each other.
        batches: All batches that were looked at, by source.
        largest: The one of them with the highest peak.
        possible: The batch with the highest peak that another order may give.
        possible_peak: That peak.
    """
    # Units that are gathered in each micro-step make ranks wait in each, and all others once a step.
    gathers = any(unit.gathers_forward and unit.reshard_after_backward for unit in plan.sharded_units)
    padding, waiting = shares(batches, 1 if gathers else params.train.accumulation)
    totals = [each.sized.of for each in batches]
    return DataFigures(
        records=sum(each.sized.records for each in batches),
        of=None if None in totals else sum(total for total in totals if total is not None),
        covers_run=all(each.sized.covers_run for each in batches),
        largest=largest,
        possible=possible,
        possible_peak=possible_peak,
        median_tokens=int(np.median(np.concatenate([each.padded.ravel() for each in batches]))),
        padding=padding,
        waiting=waiting,
    )
