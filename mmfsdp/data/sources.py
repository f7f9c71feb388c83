"""open_source: the training or held-out part of the source that DataParams names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..params import DataParams, DataSource, ParamError
from .batch import Sample
from .records import Record, expand_path, read_records
from .rows import has_turns, keys_not_read
from .shards import SHARD_SUFFIXES, ShardSource
from .splits import (
    HELD_OUT,
    TRAIN,
    check_published,
    heldout_limit,
    is_in_split,
    published_heldout,
    side_of,
    splits_note,
)
from .stream import IndexedSource, Source, load_or_corrupt
from .unread import unread_note

SPLITS = (TRAIN, HELD_OUT, "unseen")


def open_source(
    params: DataParams, *, split: str = "train", image_size: int, seed: int = 0, place: str = "data"
) -> Source:
    """Return one split of a source: train, heldout (new pictures) or unseen (new combinations; generated only).

    Real data are split as they were published, by the names of their files and folders (splits.py). Otherwise by a hash
    of each record's name, `heldout_fraction` of it held out and at least one usable record: neither the seed, nor the
    order, nor the number of ranks moves a record to the other split. Records of one picture stay together, except in
    shards. `place` is the source's name in errors. Raises ParamError naming the path if it is missing, empty, or holds
    no usable record for a split.
    """
    if split not in SPLITS:
        raise ParamError("split", f"{split!r} is not one of {', '.join(SPLITS)}")
    if params.source is DataSource.SHAPES:
        from .shapes import ShapesSource

        return IndexedSource(ShapesSource(params, split=split, image_size=image_size, seed=seed).sample)
    if split == "unseen":
        raise ParamError("split", f"unseen needs source shapes, not {params.source}; use heldout")
    try:
        if params.source is DataSource.WEBDATASET:
            return _open_shards(params, split, seed)
        return _open_records(params, split, seed)
    except ParamError as error:
        raise error.under(place) from None


def check_data(params: DataParams) -> dict[str, Source]:
    """Open every source, load records until both splits have a usable one, and return the sources by their places.

    Raises ParamError naming the field of a source that is missing, empty or of another kind.
    """
    sources = {}
    for place, source in params.sources().items():
        # Records are loaded as they are, and resized later.
        sources[place] = open_source(source, image_size=1, place=place)
    return sources


def _open_shards(params: DataParams, split: str, seed: int) -> ShardSource:
    assert params.path is not None
    shards = ShardSource.open(params, expand_path(params.path, *SHARD_SUFFIXES), seed)
    splits = {shards.split_of(shard) for shard in shards.shards}
    heldout = published_heldout(splits, params.path)
    if heldout:
        sides = {side: shards.of_side(side, heldout) for side in (TRAIN, HELD_OUT)}
        check_published(sides[TRAIN].loaded(), TRAIN, params.path, shards.skipped)
        check_published(sides[HELD_OUT].loaded(), heldout, params.path, shards.skipped)
        own = sides[split]
        own.notes.append(splits_note(params.path, splits, heldout))
        own.has_turns = any(side.has_turns for side in sides.values())
    else:
        records = ((item.name, item) for item in shards.loaded())
        limit = heldout_limit(records, params, shards.skipped)
        own = replace(shards, keep=partial(is_in_split, limit, split))
        own.has_turns = shards.has_turns
    own.notes += unread_note([shards.unread])
    return own


def _open_records(params: DataParams, split: str, seed: int) -> IndexedSource:
    records, skipped = read_records(params)
    notes = unread_note(map(keys_not_read, (record.row for record in records)))
    splits = {record.split for record in records}
    heldout = published_heldout(splits, params.path)
    if heldout:
        sides: dict[str, list[Record]] = {TRAIN: [], HELD_OUT: [], "": []}
        for record in records:
            sides[side_of(record.split, heldout)].append(record)
        check_published((load_or_corrupt(r.load) for r in sides[TRAIN]), TRAIN, params.path, skipped)
        check_published((load_or_corrupt(r.load) for r in sides[HELD_OUT]), heldout, params.path, skipped)
        own = sides[split]
        notes.append(splits_note(params.path, splits, heldout))
    else:
        limit = heldout_limit(((r.group, load_or_corrupt(r.load)) for r in records), params, skipped)
        own = [record for record in records if is_in_split(limit, split, record.group)]
    source = IndexedSource(partial(_load, own), len(own), seed, params.resample, skipped, notes)
    source.has_turns = any(has_turns(record.row) for record in records)
    return source


def _load(records: list[Record], index: int) -> Sample:
    return records[index].load()
