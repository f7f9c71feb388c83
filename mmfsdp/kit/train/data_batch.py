"""Look at a run's own data before it starts: its largest batches, whose peak is predicted, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.fake_tensors import tensors_of
from ...params import DataParams, ParamError, RunParams
from ...params.in_words import size
from ...predict.data_figures import BatchFigures
from ...predict.plan_cache import PlanCache
from ..data.batch import Sample
from ..data.loader import batch_at, batch_of, first_batches, processor_of
from ..data.open_sources import Splits, open_splits
from ..data.processor import SampleProcessor
from ..data.record_sizes import NoSizes
from ..data.sources.stream import DataSlice, IndexedSource, Loaded
from ..models.kinds import kind_of
from ..run.rank_count import with_ranks
from .data_sizes import RECORDS, SizedBatches, SizedOrder, sized_order

MAX_BATCHES, MAX_SAMPLES = 8, 64
"""Batches and samples of each source that are looked at where headers are not enough: it takes less than a second."""
MAX_BYTES = 200_000_000
"""Bytes of the largest file that is opened for a look before the run."""
MAX_ENTRIES = 2_000
"""Entries of the largest folder that is opened for a look before the run."""


@dataclass(frozen=True)
class DataBatch:
    """A batch of a run's own data."""

    inputs: dict[str, Any]
    """Keyword arguments of a forward."""
    figures: BatchFigures | None = None
    """Its records; None where their sizes are not known."""
    first: bool = False
    """It comes first in its step, so that no gradients of earlier micro-steps are held beside it."""


@dataclass(frozen=True)
class DataLook:
    """A look at a run's own data."""

    words: str
    """The largest batch in words, or why the data were not looked at."""
    largest: tuple[DataBatch, ...] = ()
    """Batches of the run of which one has the highest peak."""
    possible: tuple[DataBatch, ...] = ()
    """Batches of which one has the highest peak that another order may give."""
    batches: tuple[SizedBatches, ...] = ()
    """All batches that were looked at, by the sizes of their records."""


def look_at_data(
    params: RunParams,
    processor: SampleProcessor | None,
    cache: PlanCache,
    sources: Mapping[str, Splits] | None = None,
    *,
    most: int | None = RECORDS,
) -> DataLook:
    """Return the largest batches of a run, by the texts and the picture headers of its records.

    Args:
        params: The run.
        processor: Its processor, which says how long a record becomes.
        cache: Keeps what was seen, so that the data are read once.
        sources: What `open_sources` gives, if they are open; otherwise only data that are quick to read are opened.
        most: The most records of each source to look at, those that the run takes first. None: all, however long it
            takes.
    """
    if kind_of(params.model).example_of_data:  # the plan's example is one of the first batches
        return DataLook("")
    if processor is None:
        return DataLook("the data were not looked at: the model's tokenizer is not on this machine")
    if sources is None and most is not None and (why := why_slow_to_read(params.data)):
        return DataLook(f"the data were not looked at: {why}")
    ranks, train = with_ranks(params).launch.world_size, params.train
    seen = [params.data.to_dict(), train.batch_size, train.seed, train.steps, train.accumulation, ranks, most]
    try:
        return cache.keep(json.dumps(seen), lambda: _look(params, processor, cache, sources, ranks, most))
    except Exception as error:  # a launch tells it as an error; a plan stands without the data
        return DataLook(f"the data were not looked at: {error}")


def why_slow_to_read(data: DataParams) -> str:
    """Return why the sources of a run are not all opened for a look, with the place of one; empty if they are."""
    for place, source in data.sources().items():
        if why := slow_to_read(source):
            return f"{place}: {why}"
    return ""


def slow_to_read(source: DataParams) -> str:
    """Return why a source is not opened for a look; empty if it is quick to read."""
    takes = source.source.takes
    if takes.draws:
        return ""
    path = Path(source.path or "").expanduser()
    if not source.path or not path.exists():
        return takes.elsewhere or f"{source.path} is not on this machine"
    if path.is_dir():
        entries = 0
        for _ in path.rglob("*"):
            entries += 1
            if entries > MAX_ENTRIES:
                return f"{source.path} has more than {MAX_ENTRIES:,} files; a launch reads them"
    elif path.stat().st_size > MAX_BYTES:
        return f"{source.path} has {size(path.stat().st_size)}; a launch reads them"
    return ""


def _look(
    params: RunParams,
    processor: SampleProcessor,
    cache: PlanCache,
    opened: Mapping[str, Splits] | None,
    ranks: int,
    most: int | None,
) -> DataLook:
    splits = _opened(params, processor, opened)
    largest, possible, batches = [], [], []
    try:
        sizes = params.data.batch_sizes(params.train.batch_size)
        for (place, source), batch_size in zip(params.data.sources().items(), sizes, strict=True):
            sized = _sized(params, source, place, processor, splits, cache, batch_size * ranks, most)
            own = SizedBatches.of(place, sized, batch_size=batch_size, ranks=ranks, even_ranks=source.even_ranks)
            batches.append(own)
            largest += _largest(params, own, processor, splits)
            possible += _possible(params, own, processor_of(processor, source), splits)
    except NoSizes:
        return _largest_of_first(params, processor, splits)
    return DataLook("", tuple(largest), tuple(possible), tuple(batches))


def _opened(params: RunParams, processor: SampleProcessor, opened: Mapping[str, Splits] | None) -> dict[str, Splits]:
    """Return the sources of a run; those that are open are taken."""
    splits: dict[str, Splits] = {}
    for i, (place, source) in enumerate(params.data.sources().items()):
        if opened is not None and not source.source.takes.draws:
            splits[place] = opened[place]
        else:  # pictures are drawn as large as the processor wants them
            seed = params.train.seed + i
            splits[place] = open_splits(source, image_size=processor.image_size, seed=seed, place=place)
    return splits


def _sized(
    params: RunParams,
    source: DataParams,
    place: str,
    processor: SampleProcessor,
    splits: Mapping[str, Splits],
    cache: PlanCache,
    in_micro_step: int,
    most: int | None,
) -> SizedOrder:
    """Return the sizes of a source's records, which do not depend on how batches are made of them."""
    train = splits[place]["train"]
    positions = in_micro_step * params.train.accumulation * params.train.steps
    if most is not None and source.source.takes.gives_rows:  # a person's reader gives pictures decoded
        most = MAX_SAMPLES
    records = None if most is None else max(most, in_micro_step)
    key = json.dumps([source.to_dict(), place, params.train.seed, positions, records])
    return cache.keep(key, lambda: sized_order(train, processor_of(processor, source), positions, records))


def _largest(
    params: RunParams, own: SizedBatches, processor: SampleProcessor, splits: Mapping[str, Splits]
) -> list[DataBatch]:
    """Return the largest batches of a source, as the loader makes them."""
    found = []
    is_first_source = own.place == next(iter(params.data.sources()))
    first = is_first_source & (np.arange(len(own.tokens)) % params.train.accumulation == 0)
    for step, rank in own.largest(first):
        data_slice = DataSlice(params.train.batch_size, rank, own.tokens.shape[1], start=step)
        batch = batch_at(params.data, processor, data_slice, place=own.place, seed=params.train.seed, sources=splits)
        where = {"step": step // params.train.accumulation + 1, "rank": rank}
        figures = own.figures(own.records_of(step, rank), **where)
        found.append(DataBatch(batch.inputs(), figures, first=bool(first[step])))
    return found


def _possible(
    params: RunParams, own: SizedBatches, processor: SampleProcessor, splits: Mapping[str, Splits]
) -> list[DataBatch]:
    """Return the largest batches that a source may give."""
    source, found = splits[own.place]["train"], []
    for records in own.largest_possible():
        samples = []
        for record in records:
            item: Loaded
            if isinstance(source, IndexedSource):
                item = source.load(record)
            else:
                item, *_ = next(source.batches(DataSlice(batch_size=1, start=record)))
            if isinstance(item, Sample):
                samples.append(item)
        inputs = batch_of(samples, processor).inputs()
        found.append(DataBatch(inputs, own.figures([own.sized.sizes[record] for record in records])))
    return found


def _largest_of_first(params: RunParams, processor: SampleProcessor, splits: Mapping[str, Splits]) -> DataLook:
    """Return the largest of the first batches, for a processor that does not tell sizes.

    They do not depend on the number of ranks: of 4 ranks, the first step's batches are the first four.
    """
    size_of_batch = params.train.batch_size
    number = max(1, min(MAX_BATCHES, MAX_SAMPLES // size_of_batch))
    largest: dict[str, Any] = {}
    for batch in first_batches(
        params.data, processor, batch_size=size_of_batch, seed=params.train.seed, sources=splits, number=number
    ):
        largest = max(largest, batch.inputs(), key=input_bytes)
    if not largest:
        raise ParamError("data", "has no batch")
    which = f"the largest of the data's first {number} batches" if number > 1 else "the data's first batch"
    if len(splits) > 1:
        which = which.replace("the data's", "each source's")
    return DataLook(which, (DataBatch(largest),))


def input_bytes(inputs: dict[str, Any]) -> int:
    """Return the bytes of the tensors in the keyword arguments of a forward: the largest batch has most of them."""
    return sum(tensor.nbytes for tensor in tensors_of(inputs))
