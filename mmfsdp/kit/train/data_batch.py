"""Look at a run's own data before it starts: the largest of their first batches, whose peak is predicted, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.fake_tensors import tensors_of
from ...params import DataParams, ParamError, RunParams
from ...params.in_words import size
from ...predict.plan_cache import PlanCache
from ..data.loader import first_batches
from ..data.open_sources import Splits, open_splits
from ..data.processor import SampleProcessor
from ..models.kinds import kind_of

MAX_BATCHES, MAX_SAMPLES = 8, 64
"""Batches and samples of each source that are looked at: reading and encoding them takes less than a second."""
MAX_BYTES = 200_000_000
"""Bytes of the largest file that is opened for a look before the run."""
MAX_ENTRIES = 2_000
"""Entries of the largest folder that is opened for a look before the run."""


class DataBatch(NamedTuple):
    """A batch of a run's own data."""

    inputs: dict[str, Any] | None
    """Keyword arguments of a forward; None if the data were not looked at."""
    words: str
    """The batch in words; or why there is none."""


def data_batch(
    params: RunParams,
    processor: SampleProcessor | None,
    cache: PlanCache,
    sources: Mapping[str, Splits] | None = None,
) -> DataBatch:
    """Return the largest of the first batches, as the loader makes them, in the order in which ranks take them.

    They do not depend on the number of ranks: of 4 ranks, the first step's batches are the first four. cache:
    keeps the batch, so that the data are read once. sources: what `open_sources` gives, if they are open; otherwise
    only data that are quick to read are opened.
    """
    if kind_of(params.model).example_of_data:  # the plan's example is one of the first batches
        return DataBatch(None, "")
    if processor is None:
        return DataBatch(None, "the data were not looked at: the model's tokenizer is not on this machine")
    if sources is None and (why := why_slow_to_read(params.data)):
        return DataBatch(None, f"the data were not looked at: {why}")
    train = params.train
    key = json.dumps([params.data.to_dict(), train.batch_size, train.seed])
    try:
        return cache.keep(key, lambda: _largest(params, processor, sources))
    except Exception as error:  # a launch tells it as an error; a plan stands without the data
        return DataBatch(None, f"the data were not looked at: {error}")


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


def _largest(params: RunParams, processor: SampleProcessor, sources: Mapping[str, Splits] | None) -> DataBatch:
    opened: dict[str, Splits] = {}
    for i, (place, source) in enumerate(params.data.sources().items()):
        if sources is not None and not source.source.takes.draws:
            opened[place] = sources[place]
        else:  # pictures are drawn as large as the processor wants them
            seed = params.train.seed + i
            opened[place] = open_splits(source, image_size=processor.image_size, seed=seed, place=place)
    size_of_batch = params.train.batch_size
    number = max(1, min(MAX_BATCHES, MAX_SAMPLES // size_of_batch))
    largest: dict[str, Any] = {}
    for batch in first_batches(
        params.data, processor, batch_size=size_of_batch, seed=params.train.seed, sources=opened, number=number
    ):
        largest = max(largest, batch.inputs(), key=input_bytes)
    if not largest:
        raise ParamError("data", "has no batch")
    which = f"the largest of the data's first {number} batches" if number > 1 else "the data's first batch"
    if len(opened) > 1:
        which = which.replace("the data's", "each source's")
    return DataBatch(largest, which)


def input_bytes(inputs: dict[str, Any]) -> int:
    """Return the bytes of the tensors in the keyword arguments of a forward: the largest batch has most of them."""
    return sum(tensor.nbytes for tensor in tensors_of(inputs))
