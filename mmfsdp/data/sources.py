"""open_source: the training or held-out part of the source that DataParams names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from ..params import DataParams, DataSource, ParamError
from .batch import Sample
from .pictures import stable_hash
from .records import Record, expand_path, read_records
from .shards import SHARD_SUFFIXES, ShardSource
from .stream import IndexedSource, Loaded, Source, load_or_corrupt

SPLITS = ("train", "heldout", "unseen")


def open_source(
    params: DataParams, *, split: str = "train", image_size: int, seed: int = 0, place: str = "data"
) -> Source:
    """Return one split of a source: train, heldout (new pictures) or unseen (new combinations; generated only).

    Real data is split by a hash of each record's name, `heldout_fraction` of it held out and at least one usable
    record: neither the seed, nor the order, nor the number of ranks moves a record to the other split. Records of one
    picture stay together, except in shards. `place` is the source's name in errors. Raises ParamError naming the path
    if it is missing, empty, or holds fewer than two usable records.
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
            assert params.path is not None
            shards = ShardSource(params, expand_path(params.path, *SHARD_SUFFIXES), seed=seed)
            limit = _heldout_limit(((item.name, item) for item in shards.loaded()), params, shards.skipped)
            return replace(shards, keep=partial(_is_in_split, limit, split))
        records, skipped = read_records(params)
        limit = _heldout_limit(((record.group, load_or_corrupt(record.load)) for record in records), params, skipped)
    except ParamError as error:
        raise error.under(place) from None
    own = [record for record in records if _is_in_split(limit, split, record.group)]
    return IndexedSource(partial(_load, own), len(own), seed, params.resample, skipped)


def check_data(params: DataParams) -> None:
    """Open every source and load records until both splits have a usable one.

    Raises ParamError naming the field of a source that is missing, empty or of another kind.
    """
    for place, source in params.sources().items():
        open_source(source, image_size=1, place=place)  # records are loaded as they are, and resized later


def _load(records: list[Record], index: int) -> Sample:
    return records[index].load()


def _is_in_split(limit: int, split: str, name: str) -> bool:
    return (stable_hash(name) < limit) == (split == "heldout")


def _heldout_limit(records: Iterable[tuple[str, Loaded]], params: DataParams, skipped: dict[str, str]) -> int:
    """Return the limit below which a name's hash holds a record out, so that each split has a usable record.

    Reads until it has met one of either split. If all are in one, the record of the smallest hash is held out. Adds
    the corrupt records that it meets to `skipped`.
    """
    limit = int(params.heldout_fraction * 2**32)
    hashes: list[int] = []
    for group, loaded in records:
        if not isinstance(loaded, Sample):
            skipped[loaded.name] = loaded.reason
            continue
        hashes.append(stable_hash(group))
        if min(hashes) < limit <= max(hashes):
            return limit
    if len(set(hashes)) < 2:
        reasons = "".join(f"; {name} {reason}" for name, reason in list(skipped.items())[:3])
        message = f"{params.path!r} holds {len(hashes)} usable records ({len(skipped)} skipped{reasons}); "
        raise ParamError("path", message + "it takes two at least, one to train on and one to hold out")
    return min(hashes) + 1
