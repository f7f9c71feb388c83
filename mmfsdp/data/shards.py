"""WebDataset .tar shards, read in sequence by the `webdataset` library and dealt to ranks and workers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from ..params import SourceParams
from .batch import Sample
from .lane import Lane, Loaded, attempt, order
from .pictures import CorruptRecord
from .records import inside
from .rows import parse, sample_of

PICTURES = ("jpg", "jpeg", "png", "webp")
SHUFFLE = 1000
"""Raw records held in memory to shuffle a shard."""
SHARDS_PER_LANE = 4
"""With at least so many shards for every worker of every rank, whole shards are dealt to them. With fewer, everyone
reads all shards and keeps the positions that are its own: balanced, and cheap for data that small."""


@dataclass
class ShardSource:
    """Records in shards: members KEY.jpg (or png, webp) beside KEY.txt or KEY.json with a caption or a conversation,
    or KEY.json with an interleaved document.

    Each epoch takes the shards in a new order, or draws as many, and shuffles within each. A record's name is
    SHARD/KEY.
    """

    params: SourceParams
    shards: list[str]
    keep: Callable[[str], bool] | None = None
    """Which names belong to this source; all if unset."""
    seed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Name to reason of the records and shards found corrupt, so far, in this process."""
    length: int | None = None
    """Not known before all shards are read."""
    _sizes: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Sample]:
        """The usable samples once, in the order of the shards."""
        for name, loaded in self.named():
            if isinstance(loaded, Sample):
                yield loaded
            else:
                self.skipped[name] = loaded.reason

    def named(self) -> Iterator[tuple[str, Loaded]]:
        """All records once, in order, usable or not, by name."""
        errors: list[CorruptRecord] = []
        for url in self.shards:
            for raw in self._shard(url, errors):
                yield _name(raw), attempt(_load, self.params, raw)
        yield from ((error.name, error) for error in errors)

    def batches(self, lane: Lane) -> Iterator[list[Loaded]]:
        """The lane's batches, without end; after its samples a batch lists the shards found damaged on the way."""
        first, stride, lane = self._deal(lane)
        errors: list[CorruptRecord] = []
        raws, position = None, 0
        for step in lane.steps():
            wanted = lane.positions(step)
            if raws is None:
                raws = self._stream(first, stride, wanted.start, errors)
            else:
                next(islice(raws, wanted.start - position, wanted.start - position), None)
            loaded = [attempt(_load, self.params, raw) for raw in islice(raws, len(wanted))]
            yield [*loaded, *errors]
            errors.clear()
            position = wanted.stop

    def _deal(self, lane: Lane) -> tuple[int, int, Lane]:
        """The first shard and the stride of this worker's shards, and its lane over the records of those."""
        readers = lane.world_size * lane.workers
        if len(self.shards) < SHARDS_PER_LANE * readers:
            return 0, 1, lane
        # After a restart the loader's workers take over each other's turns: what counts is the step's remainder.
        done, turn = divmod(lane.start + lane.worker, lane.workers)
        return turn * lane.world_size + lane.rank, readers, Lane(batch_size=lane.batch_size, start=done)

    def _stream(self, first: int, stride: int, skip: int, errors: list[CorruptRecord]) -> Iterator[dict[str, Any]]:
        """Raw records of every stride-th shard of the endless list, without the first `skip`."""
        empty = 0
        for ordinal in count(first, stride):
            url = self._url(ordinal)
            if 0 < self._sizes.get(url, 0) <= skip:
                skip -= self._sizes[url]
                continue
            size = 0
            for raw in self._shard(url, errors, random.Random(f"{self.seed}/{ordinal}")):
                size += 1
                if skip:
                    skip -= 1
                else:
                    yield raw
            self._sizes[url] = size
            empty = 0 if size else empty + 1
            if empty > len(self.shards):
                raise ValueError(f"{self.shards[0]!r} and its like yield nothing any more; are they gone?")

    def _url(self, ordinal: int) -> str:
        """The endless list of shards."""
        epoch, place = divmod(ordinal, len(self.shards))
        return self.shards[order(len(self.shards), self.seed, epoch, self.params.resample)[place]]

    def _shard(
        self, url: str, errors: list[CorruptRecord], rng: random.Random | None = None
    ) -> Iterator[dict[str, Any]]:
        """Raw records of one shard: member bytes by extension. Damage to the archive itself goes to `errors`."""
        import webdataset

        def note(error: Exception) -> bool:
            errors.append(CorruptRecord(Path(url).name, f"is damaged ({type(error).__name__}: {error.args[:1]})"))
            return True

        if _is_cut(Path(url)):
            errors.append(CorruptRecord(Path(url).name, "is damaged: it has no end mark, so its last records are lost"))

        stages = [webdataset.SimpleShardList([url]), webdataset.tarfile_to_samples(handler=note)]
        if self.keep is not None:
            keep = self.keep
            stages.append(webdataset.select(lambda raw: keep(_name(raw))))
        if rng is not None:
            stages.append(webdataset.shuffle(SHUFFLE, initial=SHUFFLE, rng=rng))
        yield from webdataset.DataPipeline(*stages)


def _is_cut(path: Path) -> bool:
    """Whether a .tar does not end as archives end, in two blocks of zeros: the library takes no notice of that."""
    if path.suffix != ".tar" or not path.is_file() or not os.access(path, os.R_OK):
        return False  # what cannot be opened, the library says itself
    with path.open("rb") as file:
        file.seek(-min(1024, path.stat().st_size), 2)
        return file.read() != bytes(1024)


def _name(raw: dict[str, Any]) -> str:
    return f"{Path(raw['__url__']).name}/{raw['__key__']}"


def _load(params: SourceParams, raw: dict[str, Any]) -> Sample:
    name = _name(raw)
    row = parse(raw["json"], name=name, what="has a caption that cannot be read: it ") if "json" in raw else {}
    if "txt" in raw:
        try:
            row["text"] = raw["txt"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorruptRecord(name, f"has a caption that cannot be read ({error})") from None
    own = [kind for kind in PICTURES if kind in raw]
    if not {"conversations", "text_list"} & row.keys():
        if not own:
            raise CorruptRecord(name, f"has no picture ({', '.join(PICTURES)})")
        row["file_name"] = own[0]
    elif len(own) == 1 and isinstance(row.get("image"), str):
        row["image"] = own[0]
    return sample_of(row, params, name=name, find=partial(_find, params, raw))


def _find(params: SourceParams, raw: dict[str, Any], file: str) -> Path | bytes:
    """A picture that a record's JSON names: a member of the record (KEY.0.jpg as `0.jpg`, too), else in `pictures`."""
    member = file.removeprefix(f"{raw['__key__']}.").lower()
    if isinstance(found := raw.get(member), bytes):
        return found
    if params.pictures is None:
        raise CorruptRecord(_name(raw), f"names {file!r}, which is not in its shard; set pictures to its folder")
    return inside(Path(os.path.expanduser(params.pictures)), _name(raw), file)
