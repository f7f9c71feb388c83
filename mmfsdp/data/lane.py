"""Lane: the positions of an endless stream that one worker of one rank loads. IndexedSource: loads any position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from .batch import Sample
from .pictures import CorruptRecord

Loaded = Sample | CorruptRecord
"""What a position of a stream turns out to hold."""


@dataclass(frozen=True)
class Lane:
    """The batches of one worker of one rank.

    The batches of all ranks at one step are one run of positions, dealt to the ranks in order: their union is the
    single process's batch of world_size * batch_size. A corrupt record leaves its position empty, so that what a
    position holds depends on nothing but the data and the seed, and a restart need not replay.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    """The first step, counted from the beginning of the stream."""
    worker: int = 0
    workers: int = 1

    def steps(self) -> Iterator[int]:
        """Steps of this worker, without end."""
        return count(self.start + self.worker, self.workers)

    def positions(self, step: int) -> range:
        """Positions that make up this rank's batch."""
        first = (step * self.world_size + self.rank) * self.batch_size
        return range(first, first + self.batch_size)


def attempt(load: Callable[..., Sample], *args: Any) -> Loaded:
    """What `load(*args)` returns, or the CorruptRecord that it raises."""
    try:
        return load(*args)
    except CorruptRecord as error:
        return error.with_traceback(None)


def order(length: int, seed: int, epoch: int, resample: bool) -> np.ndarray:
    """The indices of an epoch, (length,): a permutation, or with `resample` as many drawn with replacement."""
    rng = np.random.default_rng((seed, epoch))
    return rng.integers(length, size=length) if resample else rng.permutation(length)


@dataclass
class IndexedSource:
    """Records that can be loaded in any order: each epoch is a new permutation of them.

    Without a length the stream is the records 0, 1, 2, ... themselves.
    """

    load: Callable[[int], Sample]
    """Loads one record by index; raises CorruptRecord."""
    length: int | None = None
    seed: int = 0
    resample: bool = False
    """Each epoch draws as many records with replacement instead."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name to reason of the records found corrupt, so far, in this process."""

    def __iter__(self) -> Iterator[Sample]:
        """The usable samples once, in their own order; endless if the source is."""
        for index in count() if self.length is None else range(self.length):
            loaded = attempt(self.load, index)
            if isinstance(loaded, Sample):
                yield loaded
            else:
                self.skipped[loaded.name] = loaded.reason

    def batches(self, lane: Lane) -> Iterator[list[Loaded]]:
        """The lane's batches, without end."""
        orders: dict[int, np.ndarray] = {}
        for step in lane.steps():
            yield [attempt(self.load, self._index(p, orders)) for p in lane.positions(step)]

    def _index(self, position: int, orders: dict[int, np.ndarray]) -> int:
        if self.length is None:
            return position
        epoch, place = divmod(position, self.length)
        if epoch not in orders:
            orders.clear()
            orders[epoch] = order(self.length, self.seed, epoch, self.resample)
        return int(orders[epoch][place])
