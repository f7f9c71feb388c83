"""batches: the endless, restartable stream of batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..params import DataParams
from .batch import Batch
from .lane import Lane, Loaded
from .pictures import CorruptRecord, stable_hash
from .processor import Processor, Row
from .sources import Source, open_source

REMEMBERED = 10_000
"""Names of skipped records that are kept; beyond, they are only counted."""
PATIENCE = 1000
"""Unusable records in a row (or as many as the source has) after which it is taken for lost."""


def batches(
    params: DataParams,
    processor: Processor,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    start: int = 0,
) -> Batches:
    """Training batches of one rank, without end, the same for the same arguments.

    Several sources take turns: each micro-step has a batch of each. `batch_size` is the first's, and that of those that
    set none. `start` is the number of micro-steps already consumed: the stream goes on exactly there. At each step the
    ranks' batches of a source together are the single process's batch of world_size * batch_size, in order of rank (for
    shards: where they are too few to be dealt whole; see `shards.SHARDS_PER_LANE`). A corrupt record leaves its batch
    one sample smaller. Raises ParamError if a source cannot be opened.
    """
    sizes = [batch_size, *(more.batch_size or batch_size for more in params.more)]
    streams = []
    for i, ((place, one), size) in enumerate(zip(params.sources().items(), sizes, strict=True)):
        source = open_source(one, image_size=processor.image_size, seed=seed + i, place=place)
        fitted = replace(processor, max_length=one.max_length, augment=one.augment)
        lane = Lane(batch_size=size, rank=rank, world_size=world_size, start=start)
        loader = DataLoader(
            _Steps(source, fitted, lane, seed + i, place, one.weight),
            batch_size=None,
            num_workers=one.workers,
            multiprocessing_context="spawn" if one.workers else None,  # a fork would copy gloo's and CUDA's threads
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # leaves the global random state, which checkpoints hold, alone
        )
        streams.append((loader, place, Lacks(one.path or str(one.source), dict(source.skipped))))
    return Batches(streams)


@dataclass
class Delivery:
    """A batch and what was left out of it."""

    batch: Batch
    skipped: dict[str, str]
    cut: int

    def pin_memory(self) -> Delivery:
        """Asked for by torch's DataLoader."""
        return replace(self, batch=self.batch.pin_memory())


@dataclass
class Lacks:
    """What a source's data lacked so far, on this rank."""

    path: str
    skipped: dict[str, str]
    """Name to reason of corrupt records (the first 10,000 names)."""
    skipped_count: int = field(init=False)
    """How many times a record was skipped; one that comes up in every epoch counts every time."""
    cut_count: int = 0
    """Samples cut to max_length."""
    fresh: list[str] = field(init=False)
    """Names that `Batches.news` has not told yet."""

    def __post_init__(self) -> None:
        self.skipped_count, self.fresh = len(self.skipped), list(self.skipped)

    def note(self, delivery: Delivery) -> None:
        """Count what was left out of a batch."""
        for name, reason in delivery.skipped.items():
            if name not in self.skipped and len(self.skipped) < REMEMBERED:
                self.skipped[name] = reason
                self.fresh.append(name)
        self.skipped_count += len(delivery.skipped)
        self.cut_count += delivery.cut


class Batches:
    """Iterator over Batch that keeps count of what the data lacked, over all workers of this rank."""

    lacks: dict[str, Lacks]
    """By the source's place in the parameters: data, data.more.0, ..."""

    def __init__(self, streams: Sequence[tuple[DataLoader, str, Lacks]]):
        self._turns: Iterator[tuple[Iterator[Delivery], Lacks]] = cycle([(iter(s[0]), s[2]) for s in streams])
        self.lacks = {place: lacks for _, place, lacks in streams}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        deliveries, lacks = next(self._turns)
        delivery = next(deliveries)
        lacks.note(delivery)
        return delivery.batch

    def take(self, micro_steps: int) -> list[Batch]:
        """The batches of so many micro-steps: one of each source in each."""
        return list(islice(self, micro_steps * len(self.lacks)))

    def news(self) -> list[str]:
        """A line for each record found corrupt since the last call."""
        lines = []
        for lack in self.lacks.values():
            lines += [f"{lack.path}: skipped {name!r}, which {lack.skipped[name]}" for name in lack.fresh]
            lack.fresh.clear()
        return lines


def sum_up(ranks: Sequence[Mapping[str, Lacks]], *, most: int = 100) -> dict[str, dict[str, Any]]:
    """What the data lacked on all ranks together, as plain data by source; of skipped names at most so many."""
    sums: dict[str, dict[str, Any]] = {}
    for source in ranks[0]:
        lacks = [rank[source] for rank in ranks]
        records = dict(chain.from_iterable(lack.skipped.items() for lack in lacks))
        sums[source] = {
            "path": lacks[0].path,
            "times": sum(lack.skipped_count for lack in lacks),
            "records": len(records),
            "reasons": dict(islice(records.items(), most)),
            "cut": sum(lack.cut_count for lack in lacks),
        }
    return sums


class _Steps(IterableDataset):
    """What runs in a worker: a source's lane, encoded."""

    def __init__(self, source: Source, processor: Processor, lane: Lane, seed: int, place: str, weight: float):
        self.source, self.processor, self.lane, self.seed = source, processor, lane, seed
        self.place, self.weight = place, weight

    def __iter__(self) -> Iterator[Delivery]:
        worker: Any = get_worker_info()
        lane = replace(self.lane, worker=worker.id, workers=worker.num_workers) if worker else self.lane
        barren = 0
        for step, loaded in zip(lane.steps(), self.source.batches(lane), strict=False):
            delivery, learned = self._deliver(step, loaded)
            barren = 0 if learned else barren + len(loaded)
            if barren >= min(self.source.length or PATIENCE, PATIENCE):
                reasons = "; ".join(f"{name} {why}" for name, why in list(delivery.skipped.items())[:3])
                raise ValueError(f"{self.place}.path: the last {barren} records were all unusable: {reasons}")
            yield delivery

    def _deliver(self, step: int, loaded: list[Loaded]) -> tuple[Delivery, int]:
        """The batch, and how many samples are in it."""
        rows: list[Row] = []
        skipped: dict[str, str] = {}
        for item in loaded:
            try:
                if isinstance(item, CorruptRecord):
                    raise item
                rows.append(self.processor.encode(item, seed=stable_hash(f"{self.seed}/{step}/{item.name}")))
            except CorruptRecord as error:
                skipped[error.name] = error.reason
        batch = replace(self.processor.collate(rows), weight=self.weight, source=self.place)
        return Delivery(batch, skipped, sum(row.cut for row in rows)), len(rows)
