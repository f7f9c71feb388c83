"""batches: the endless, restartable stream of batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...params import DataParams, SourceParams
from ...params.own import path_of
from .batch import Batch, Sample
from .corrupt import CorruptRecord, first_reasons
from .open_sources import Splits, open_sources
from .pictures import stable_hash
from .processor import SampleProcessor
from .record_sizes import add_lengths
from .sources.stream import DataSlice, Loaded, Source
from .worker_processes import worker_context

MAX_SKIPPED_NAMES = 10_000
"""Skipped records of a rank that are kept; what it skips beyond them is not counted."""
LISTED = 100
"""Skipped records of a source that result.json lists."""
MAX_CORRUPT_IN_A_ROW = 1000
"""Unusable records in a row (or as many as the source has) that end a run."""


def batches(
    params: DataParams,
    processor: SampleProcessor,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    start: int = 0,
    pin_memory: bool = False,
    sources: Mapping[str, Splits] | None = None,
) -> Batches:
    """Return the training batches of one rank, without end, the same for the same arguments.

    Several sources take turns: each micro-step has a batch of each. At each step the ranks' batches of a source
    together are the single process's batch of world_size * batch_size, in order of rank. A corrupt record leaves its
    batch one sample smaller.

    Args:
        params: The sources.
        processor: Encodes samples.
        batch_size: Samples in a batch of the first source, and of each that does not set its own `batch_size`.
        rank: This rank.
        world_size: Number of ranks.
        seed: Seed of the order of the samples.
        start: Micro-steps that were consumed already: the stream continues exactly there.
        pin_memory: Put batches into pinned memory, from which a GPU reads without waiting. It takes memory of the GPU.
        sources: What `open_sources` gives, if they are open. Default: they are opened.

    Raises:
        ParamError: If a source cannot be opened.
    """
    if sources is None:
        sources = open_sources(params, image_size=processor.image_size, seed=seed)
    data_slice = DataSlice(batch_size=batch_size, rank=rank, world_size=world_size, start=start)
    loaders, skipped = [], {}
    for name, encoded in _encoded(params, processor, data_slice, seed, sources).items():
        source, source_params = encoded.source, params.sources()[name]
        workers = source_params.workers
        loader = DataLoader(
            encoded,
            batch_size=None,
            num_workers=workers,
            multiprocessing_context=worker_context() if workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # leaves the global random state, which checkpoints hold, alone
        )
        loaders.append(loader)
        skipped[name] = SkippedRecords(place_of(source_params))
        skipped[name].add(source.skipped)
    return Batches(loaders, skipped)


def first_batches(
    params: DataParams,
    processor: SampleProcessor,
    *,
    batch_size: int,
    number: int,
    seed: int = 0,
    sources: Mapping[str, Splits],
) -> Iterator[Batch]:
    """Yield so many batches of each source, as `batches` gives them to a single rank, in this process, and say nothing.

    Raises ValueError if records are all unusable.
    """
    for encoded in _encoded(params, processor, DataSlice(batch_size=batch_size), seed, sources).values():
        yield from islice(encoded, number)


def batch_at(
    params: DataParams,
    processor: SampleProcessor,
    data_slice: DataSlice,
    *,
    place: str = "data",
    seed: int = 0,
    sources: Mapping[str, Splits],
) -> Batch:
    """Return the first batch of a slice of one source, as `batches` gives it, in this process.

    Args:
        params: The sources.
        processor: Encodes samples.
        data_slice: Says which batch of which rank; a source with a batch size of its own takes that.
        place: The source's name in the parameters.
        seed: Seed of the order of the samples.
        sources: What `open_sources` gives.

    Raises ValueError if its records are all unusable, and so are others.
    """
    return next(iter(_encoded(params, processor, data_slice, seed, sources)[place]))


def batch_of(samples: Sequence[Sample], processor: SampleProcessor) -> Batch:
    """Return the batch of some samples, without those that cannot be used. processor: as `processor_of` gives it."""
    encoded = []
    for sample in samples:
        with suppress(CorruptRecord):
            encoded.append(processor.encode(sample))
    return processor.collate(processor.filled(encoded, len(samples)))


def _encoded(
    params: DataParams, processor: SampleProcessor, data_slice: DataSlice, seed: int, sources: Mapping[str, Splits]
) -> dict[str, _EncodedBatches]:
    """Return the batches of each source by its place. data_slice: of the first one, for a batch size of their own."""
    sizes = params.batch_sizes(data_slice.batch_size)
    encoded = {}
    for i, (name, source) in enumerate(params.sources().items()):
        own_processor = processor_of(processor, source)
        own_slice = replace(data_slice, batch_size=sizes[i])
        add_lengths(sources[name]["train"], own_processor, name)
        encoded[name] = _EncodedBatches(sources[name]["train"], own_processor, own_slice, seed + i, name, source.weight)
    return encoded


def processor_of(processor: SampleProcessor, source: DataParams) -> SampleProcessor:
    """Return the processor as it encodes the samples of a source."""
    return replace(processor, max_length=source.max_length, augment=source.augment)


def place_of(params: SourceParams) -> str:
    """Return what names a source in a log: its path, its reader, or its kind."""
    return params.path or (path_of(params.reader) if params.reader else str(params.source))


@dataclass
class SkippedRecords:
    """Records of a source that this rank could not use so far."""

    path: str
    reasons: dict[str, str] = field(default_factory=dict)
    """Label to reason, of the first 10,000."""
    truncated: int = 0
    """Samples cut to max_length."""

    def add(self, reasons: Mapping[str, str], truncated: int = 0) -> None:
        """Count the records that were left out of a batch, and print each when it is first met."""
        for label, reason in reasons.items():
            if label not in self.reasons and len(self.reasons) < MAX_SKIPPED_NAMES:
                self.reasons[label] = reason
                print(f"{self.path}: skipped {label!r}, which {reason}")
        self.truncated += truncated


class Batches:
    """Iterator over Batch that counts skipped records, over all workers of this rank."""

    def __init__(self, loaders: Sequence[DataLoader], skipped: dict[str, SkippedRecords]):
        self.skipped = skipped
        """Skipped records by the source's name in the parameters: data, data.more.0, ..."""
        self._iterators = [iter(loader) for loader in loaders]
        self._turn = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch: Batch = next(self._iterators[self._turn])
        self._turn = (self._turn + 1) % len(self._iterators)
        self.skipped[batch.source].add(batch.skipped, batch.truncated)
        return batch

    def take(self, micro_steps: int) -> list[Batch]:
        """Return the batches of so many micro-steps: one of each source in each."""
        return [next(self) for _ in range(micro_steps * len(self._iterators))]


def sum_skipped(ranks: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the skipped records of all ranks by source, with the first 100 labels. ranks: SkippedRecords as dicts.

    `at_least` says that a rank skipped more than it kept.
    """
    sums: dict[str, dict[str, Any]] = {}
    for source, first in ranks[0].items():
        reasons: dict[str, str] = {}
        for rank in ranks:
            reasons.update(rank[source]["reasons"])
        sums[source] = {
            "path": first["path"],
            "records": len(reasons),
            "at_least": any(len(rank[source]["reasons"]) >= MAX_SKIPPED_NAMES for rank in ranks),
            "reasons": dict(list(reasons.items())[:LISTED]),
            "cut": sum(rank[source]["truncated"] for rank in ranks),
        }
    return sums


def add_skipped(summed: dict[str, Any], reasons: Mapping[str, str]) -> None:
    """Add records that were skipped after the training to what `sum_skipped` returns of their source, in place."""
    new = {label: reason for label, reason in reasons.items() if label not in summed["reasons"]}
    summed["records"] += len(new)
    summed["reasons"] = dict(list((summed["reasons"] | new).items())[:LISTED])


@dataclass
class _EncodedBatches(IterableDataset):
    """The part of a loader that runs in a worker: a source's slice, encoded."""

    source: Source
    processor: SampleProcessor
    data_slice: DataSlice
    seed: int
    name: str
    weight: float

    def __iter__(self) -> Iterator[Batch]:
        data_slice = self.data_slice
        worker: Any = get_worker_info()
        if worker:
            data_slice = replace(data_slice, worker=worker.id, workers=worker.num_workers)
        limit = min(self.source.length or MAX_CORRUPT_IN_A_ROW, MAX_CORRUPT_IN_A_ROW)
        corrupt_in_a_row = 0
        for step, loaded in zip(data_slice.steps(), self.source.batches(data_slice), strict=False):
            batch, usable = self._batch(step, loaded)
            corrupt_in_a_row = 0 if usable else corrupt_in_a_row + len(loaded)
            if corrupt_in_a_row >= limit:
                reasons = first_reasons(batch.skipped)
                raise ValueError(
                    f"{self.name}.{self.source.field}: the last {corrupt_in_a_row} records were all unusable: {reasons}"
                )
            yield batch

    def _batch(self, step: int, loaded: list[Loaded]) -> tuple[Batch, int]:
        """Return the batch, and the number of usable samples in it."""
        samples = []
        skipped: dict[str, str] = {}
        item: Any
        for item in loaded:
            try:
                if isinstance(item, CorruptRecord):
                    raise item
                seed = stable_hash(f"{self.seed}/{step}/{item.name}")
                samples.append(self.processor.encode(item, seed=seed))
            except CorruptRecord as error:
                skipped[item.label] = error.reason
        batch = self.processor.collate(self.processor.filled(samples, len(loaded)))
        usable = len(samples) - len(batch.skipped)
        skipped |= batch.skipped
        return replace(batch, weight=self.weight, source=self.name, skipped=skipped), usable
