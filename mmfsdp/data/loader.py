"""batches: the endless, restartable stream of batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmfsdp.params import DataParams

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

    `start` is the number of batches (micro-steps) already consumed: the stream goes on exactly there. At each step the
    ranks' batches together are the single process's batch of world_size * batch_size, in order of rank (for shards:
    where they are too few to be dealt whole; see `shards.SHARDS_PER_LANE`). A corrupt record leaves its batch one
    sample smaller. Raises ParamError if the source cannot be opened.
    """
    source = open_source(params, image_size=processor.image_size, seed=seed)
    processor = replace(processor, max_length=params.max_length, augment=params.augment)
    lane = Lane(batch_size=batch_size, rank=rank, world_size=world_size, start=start)
    loader = DataLoader(
        _Steps(source, processor, lane, seed),
        batch_size=None,
        num_workers=params.workers,
        multiprocessing_context="spawn" if params.workers else None,  # a fork would copy gloo's and CUDA's threads
        generator=torch.Generator(),  # leaves the global random state, which checkpoints hold, alone
    )
    return Batches(loader, params.path or str(params.source), dict(source.skipped))


@dataclass
class Delivery:
    """A batch and what was left out of it."""

    batch: Batch
    skipped: dict[str, str]
    cut: int


@dataclass
class Lacks:
    """What a source's data lacked so far, on this rank."""

    skipped: dict[str, str]
    """Name to reason of corrupt records (the first 10,000 names)."""
    skipped_count: int = 0
    """How many times a record was skipped; one that comes up in every epoch counts every time."""
    cut_count: int = 0
    """Samples cut to max_length."""
    fresh: list[str] = field(default_factory=list)
    """Names that `Batches.news` has not told yet."""

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
    """By source: its path, or what it is called where it has none."""

    def __init__(self, loader: DataLoader, source: str, skipped: dict[str, str]):
        self._deliveries: Iterator[Delivery] = iter(loader)
        self._source = source
        self.lacks = {source: Lacks(skipped, len(skipped), fresh=list(skipped))}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        delivery = next(self._deliveries)
        self.lacks[self._source].note(delivery)
        return delivery.batch

    def news(self) -> list[str]:
        """A line for each record found corrupt since the last call."""
        lines = []
        for source, lack in self.lacks.items():
            lines += [f"{source}: skipped {name!r}, which {lack.skipped[name]}" for name in lack.fresh]
            lack.fresh.clear()
        return lines


def sum_up(ranks: Sequence[Mapping[str, Lacks]], *, most: int = 100) -> dict[str, dict[str, Any]]:
    """What the data lacked on all ranks together, as plain data by source; of skipped names at most so many."""
    sums: dict[str, dict[str, Any]] = {}
    for source in ranks[0]:
        lacks = [rank[source] for rank in ranks]
        records = dict(chain.from_iterable(lack.skipped.items() for lack in lacks))
        sums[source] = {
            "times": sum(lack.skipped_count for lack in lacks),
            "records": len(records),
            "reasons": dict(islice(records.items(), most)),
            "cut": sum(lack.cut_count for lack in lacks),
        }
    return sums


class _Steps(IterableDataset):
    """What runs in a worker: a source's lane, encoded."""

    def __init__(self, source: Source, processor: Processor, lane: Lane, seed: int):
        self.source, self.processor, self.lane, self.seed = source, processor, lane, seed

    def __iter__(self) -> Iterator[Delivery]:
        worker: Any = get_worker_info()
        lane = replace(self.lane, worker=worker.id, workers=worker.num_workers) if worker else self.lane
        barren = 0
        for step, loaded in zip(lane.steps(), self.source.batches(lane), strict=False):
            delivery, learned = self._deliver(step, loaded)
            barren = 0 if learned else barren + len(loaded)
            if barren >= min(self.source.length or PATIENCE, PATIENCE):
                reasons = "; ".join(f"{name} {why}" for name, why in list(delivery.skipped.items())[:3])
                raise ValueError(f"data.path: the last {barren} records were all unusable: {reasons}")
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
        return Delivery(self.processor.collate(rows), skipped, sum(row.cut for row in rows)), len(rows)
