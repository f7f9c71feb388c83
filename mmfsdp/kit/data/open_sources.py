"""open_sources: all sources that DataParams names, each opened once.

The function that opens a kind of source is named next to it, in params.DataSource.
"""

from __future__ import annotations

from collections.abc import Callable

from ...params import DataParams, ParamError, RunParams
from .processor import SampleProcessor
from .sources.arrange import Arrange
from .sources.stream import IndexedSource, Source
from .value_range import range_notes

Splits = dict[str, Source]
"""train, heldout (new pictures), and for generated pictures unseen (new combinations), by name."""
OpenSource = Callable[..., Splits]
"""(DataParams, image_size, seed) -> Splits. Raises ParamError naming the path if it is missing, empty, or holds no
usable record for a split. A picture that is drawn has `image_size` pixels a side; those that are read keep theirs."""


def open_splits(
    params: DataParams, *, image_size: int, seed: int = 0, place: str = "data", as_given: bool = False
) -> Splits:
    """Return all splits of one source, which is read once.

    Real data are split as they were published, by the names of their files and folders (splits.py). Otherwise by a hash
    of each record's name, `heldout_fraction` of it held out and at least one usable record: neither the seed, nor the
    order, nor the number of ranks moves a record to the other split. Records of one picture stay together, except in
    shards. `place` is the source's name in errors. as_given: rows of a person's own reader are not turned into samples,
    for a model of their own. Raises ParamError naming the path if it is missing, empty, or holds
    no usable record for a split, and for an order by lengths where records have no index.
    """
    open_kind: OpenSource = params.source.load()
    takes = params.source.takes
    options = {"as_given": as_given} if takes.gives_rows else {}
    try:
        splits = open_kind(params, image_size=image_size, seed=seed, **options)
    except ParamError as error:
        raise error.under(place) from None
    train = splits["train"]
    if params.by_length or params.even_ranks:
        if not isinstance(train, IndexedSource):
            words = "needs the length of every record before the first step, and these records come one after the other"
            raise ParamError(f"{place}.{'by_length' if params.by_length else 'even_ranks'}", f"{words}; unset it")
        train.arrange = Arrange(params.by_length, params.longest_first, params.even_ranks)
    if not takes.draws and not as_given and train.can_be_read_again:
        notes = range_notes(train.loaded(), params.picture_range)
        for split in splits.values():
            split.picture_notes = notes
    return splits


def open_source(
    params: DataParams, *, split: str = "train", image_size: int, seed: int = 0, place: str = "data"
) -> Source:
    """Return one split of a source; see `open_splits`. Raises ParamError if the source has no such split."""
    splits = open_splits(params, image_size=image_size, seed=seed, place=place)
    if split not in splits:
        raise ParamError("split", f"{split!r} is none of source {params.source}; choose {', '.join(splits)}")
    return splits[split]


def open_sources(params: DataParams, *, image_size: int, seed: int = 0, as_given: bool = False) -> dict[str, Splits]:
    """Return the splits of every source by its place: data, data.more.0, ... Raises ParamError as `open_splits`.

    Opening loads records until each split has a usable one.
    """
    sources = {}
    for i, (place, source) in enumerate(params.sources().items()):
        sources[place] = open_splits(source, image_size=image_size, seed=seed + i, place=place, as_given=as_given)
    return sources


def open_for(processor: SampleProcessor, params: RunParams) -> dict[str, Splits]:
    """Return the splits of every source of a run by its place, with what the processor takes: samples or given rows.

    Raises ParamError as `open_splits`.
    """
    size, seed = processor.image_size, params.train.seed
    return open_sources(params.data, image_size=size, seed=seed, as_given=processor.takes_given_rows)
