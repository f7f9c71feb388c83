"""Source: a stream of samples. DataSlice: the positions of an endless stream that a worker of a rank loads.

A position holds the same record whatever the number of ranks and workers, so a run can be restarted anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from ..batch import Sample
from ..corrupt import CorruptRecord
from ..own_random import own_random
from ..pictures import stable_hash
from .arrange import Arrange, deal_evenly


@dataclass(frozen=True)
class GivenRow:
    """A row as a person's reader gave it, for a processor of their own."""

    row: Any
    name: str

    @property
    def label(self) -> str:
        """Return what tells this row from all others of its source."""
        return self.name


Loaded = Sample | GivenRow | CorruptRecord
"""The content of a position of a stream."""


@dataclass(frozen=True)
class DataSlice:
    """The batches of one worker of one rank.

    The batches of all ranks at one step are consecutive positions, dealt to the ranks in order: together they are the
    single process's batch of world_size * batch_size. A corrupt record leaves its position empty, so the content of a
    position depends on the data and the seed alone, and a restart needs no replay.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    """The first step, counted from the beginning of the stream."""
    worker: int = 0
    workers: int = 1

    def steps(self) -> Iterator[int]:
        """Yield this worker's steps, without end."""
        return count(self.start + self.worker, self.workers)

    def positions(self, step: int) -> range:
        """Return the positions of this rank's batch."""
        first = (step * self.world_size + self.rank) * self.batch_size
        return range(first, first + self.batch_size)

    def of_all_ranks(self, step: int) -> range:
        """Return the positions of the batches of all ranks."""
        in_step = self.world_size * self.batch_size
        return range(step * in_step, (step + 1) * in_step)


def load_or_corrupt(load: Callable[..., Sample | GivenRow], *args: Any) -> Loaded:
    """Return `load(*args)`, or the CorruptRecord that it raises."""
    try:
        return load(*args)
    except CorruptRecord as error:
        return error.with_traceback(None)


def epoch_order(length: int, seed: int, epoch: int, resample: bool) -> np.ndarray:
    """Return an epoch's indices (length,): a permutation, or with `resample` as many drawn with replacement."""
    rng = np.random.default_rng((seed, epoch))
    return rng.integers(length, size=length) if resample else rng.permutation(length)


@dataclass(frozen=True)
class Blocks:
    """Blocks of records that can only be read as a whole, such as the row groups of Parquet files."""

    block_of: np.ndarray
    """(N,) the block of each record."""
    sizes: np.ndarray
    """(B,) bytes of each block."""
    at_a_time: int
    """Bytes of blocks whose records are mixed."""

    def rearranged(self, order: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Return an epoch's order (N,) so rearranged that each block is needed during a part of it only.

        Blocks are taken in a random order, as many at a time as have `at_a_time` bytes, and the records of these keep
        their random order among each other. Where all blocks fit, the order stays as it is.
        """
        turn = np.random.default_rng((seed, epoch, len(self.sizes))).permutation(len(self.sizes))
        bytes_before = np.cumsum(self.sizes[turn]) - self.sizes[turn]
        part_of_block = np.empty(len(self.sizes), np.int64)
        part_of_block[turn] = bytes_before // self.at_a_time
        return order[np.argsort(part_of_block[self.block_of[order]], kind="stable")]


def at_epoch(loaded: Loaded, epoch: int) -> Loaded:
    """Return what an epoch learns of a record: where a sample has several right answers, each epoch has the next."""
    return loaded.for_epoch(epoch) if isinstance(loaded, Sample) else loaded


class Source(ABC):
    """A stream of samples; `DataSlice` says how it is dealt to ranks and workers."""

    skipped: dict[str, str]
    """Label to reason of the corrupt records that this process has met."""
    notes: list[str]
    """Notes on the source: how it is split, what is not read."""
    picture_notes: Sequence[str] = ()
    """Notes on the values of its pictures."""
    length: int | None
    """Number of records; None if unknown, or if they are generated without end."""
    has_turns: bool = False
    """It has conversations of several turns, as far as it was read to open it."""
    has_system: bool = False
    """It has samples with a system text, as far as it was read to open it."""
    field: str = "path"
    """The parameter that names it, for errors and notes."""
    can_be_read_again: bool = True
    """Its first records may be read to look at them: nobody's code is called once more for that."""

    @abstractmethod
    def loaded(self) -> Iterator[Loaded]:
        """Yield all records once, in a fixed order, usable or not; without end if they are generated."""

    @abstractmethod
    def batches(self, data_slice: DataSlice) -> Iterator[list[Loaded]]:
        """Yield the slice's batches, without end."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the usable samples once, and count the others as skipped."""
        for item in self.loaded():
            if isinstance(item, CorruptRecord):
                self.skipped[item.label] = item.reason
            else:
                yield item


@dataclass
class IndexedSource(Source):
    """Records that can be loaded in any order: each epoch is a new permutation of them.

    Without a length, the stream is the records 0, 1, 2, ... themselves.
    """

    load: Callable[[int], Sample | GivenRow]
    """Loads one record by index; raises CorruptRecord."""
    length: int | None = None
    seed: int = 0
    resample: bool = False
    """Each epoch draws as many records with replacement instead."""
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    blocks: Blocks | None = None
    """Records that are read together, and so come near each other in an epoch. None: each is read by itself."""
    arrange: Arrange | None = None
    """The arrangement of records by their lengths; None: in random order."""
    lengths: np.ndarray | None = None
    """(N,) tokens of each record, where `arrange` needs them; they are measured before the first batch."""
    may_be_random: bool = False
    """Loading may draw random numbers: they depend on the place in the stream alone, so that a resumed run has them."""

    def loaded(self) -> Iterator[Loaded]:
        """Yield all records once, in their own order; without end if there is no length."""
        for index in count() if self.length is None else range(self.length):
            yield self._at(index, index)

    def batches(self, data_slice: DataSlice) -> Iterator[list[Loaded]]:
        """Yield the slice's batches, without end."""
        order, order_epoch = np.empty(0, dtype=int), -1
        is_dealt = self.arrange is not None and self.arrange.even_ranks
        for step in data_slice.steps():
            places = []
            for position in data_slice.of_all_ranks(step) if is_dealt else data_slice.positions(step):
                index, epoch = position, 0
                if self.length is not None:
                    epoch, offset = divmod(position, self.length)
                    if epoch != order_epoch:
                        order, order_epoch = self.order(epoch), epoch
                    index = int(order[offset])
                places.append((index, epoch, position))
            if is_dealt:
                assert self.lengths is not None
                lengths = self.lengths[[index for index, _, _ in places]]
                own = deal_evenly(lengths, data_slice.world_size)[data_slice.rank]
                places = [places[place] for place in own.tolist()]
            yield [at_epoch(self._at(index, position), epoch) for index, epoch, position in places]

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices (length,) of an epoch's records, in the order in which they are taken."""
        assert self.length is not None
        order = epoch_order(self.length, self.seed, epoch, self.resample)
        if self.blocks:
            order = self.blocks.rearranged(order, self.seed, epoch)
        if self.arrange:
            assert self.lengths is not None, "measured before the first batch"
            order = self.arrange.order(order, self.lengths, self.seed, epoch)
        return order

    def _at(self, index: int, position: int) -> Loaded:
        """Return a record, which stands at that position in the stream."""
        if not self.may_be_random:
            return load_or_corrupt(self.load, index)
        with own_random(stable_hash(f"{self.seed}/{position}")):
            return load_or_corrupt(self.load, index)
