"""open_source: the source that DataParams names, its train or held-out part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol

from ..params import DataParams, DataSource, ParamError
from .batch import Sample
from .files import expand
from .lane import IndexedSource, Lane, Loaded, attempt
from .pictures import stable_hash
from .records import Record, read_folder, read_json
from .shards import ShardSource

SPLITS = ("train", "heldout", "unseen")
_READERS = {DataSource.FOLDER: read_folder, DataSource.JSON: read_json}
"""What finds the records of a source, where they can be counted and dealt by number."""


class Source(Protocol):
    """A stream of samples; see Lane for how it is dealt to ranks and workers."""

    skipped: dict[str, str]
    """Name to reason of corrupt records, as far as this process has met them."""
    length: int | None
    """Records, where that is known; None if they are generated without end."""

    def __iter__(self) -> Iterator[Sample]:
        """The usable samples once, in a fixed order; without end if they are generated."""

    def batches(self, lane: Lane) -> Iterator[list[Loaded]]:
        """The lane's batches, without end."""


def open_source(
    params: DataParams, *, split: str = "train", image_size: int, seed: int = 0, place: str = "data"
) -> Source:
    """Open one split of a source: train, heldout (new pictures) or unseen (new combinations; generated only).

    Real data is split by a hash of each record's name, `heldout_fraction` of it held out and never less than one
    usable record: neither the seed, nor the order, nor the number of ranks moves a record to the other side. Records of
    one picture stay together, but for shards. `place` is where errors say that the parameters stand. Raises ParamError
    naming the path if it is missing, empty, or holds fewer than two usable records.
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


def _open_records(params: DataParams, split: str, seed: int) -> Source:
    records, skipped = _READERS[params.source](params)
    limit = _limit(((r.group, attempt(r.load)) for r in records), params, skipped)
    mine = [record for record in records if _belongs(limit, split, record.group)]
    return IndexedSource(partial(_load, mine), len(mine), seed, params.resample, skipped)


def _load(records: list[Record], index: int) -> Sample:
    return records[index].load()


def _open_shards(params: DataParams, split: str, seed: int) -> Source:
    assert params.path is not None
    source = ShardSource(params, [str(file) for file in expand(params.path, ".tar")], seed=seed)
    limit = _limit(source.named(), params, source.skipped)
    return ShardSource(params, source.shards, partial(_belongs, limit, split), seed, source.skipped)


def _belongs(limit: int, split: str, name: str) -> bool:
    return (stable_hash(name) < limit) == (split == "heldout")


def _limit(records: Iterable[tuple[str, Loaded]], params: DataParams, skipped: dict[str, str]) -> int:
    """Names that hash below this are held out. Reads on until it has met a usable record on either side; where there
    is none on one, the usable record of the smallest hash is held out. Notes what it finds corrupt in `skipped`."""
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
        first = "".join(f"; {name} {reason}" for name, reason in list(skipped.items())[:3])
        raise ParamError(
            "path",
            f"{params.path!r} holds {len(hashes)} usable records ({len(skipped)} skipped{first}); "
            "it takes two at least, one to train on and one to hold out",
        )
    return min(hashes) + 1
