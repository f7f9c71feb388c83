"""WebDataset shards (.tar, also compressed), read one after the other.

Every reader lists all records of a shard, and reads its own. A compressed shard is unpacked into memory for that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from ..params import SourceParams
from .archive import Loss, Member, read_archive
from .batch import Sample
from .pictures import CorruptRecord
from .rows import parse_row, sample_of
from .stream import DataSlice, Loaded, Source, epoch_order, load_or_corrupt

PICTURES = ("jpg", "jpeg", "png", "webp")
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Endings of the files that a folder of shards holds. Reading looks at a file's first bytes, not at its name, and names
one of zstd as lost."""


@dataclass
class ShardRecord:
    """The members KEY.* of a shard, of which those of an uncompressed one are not read yet."""

    shard: Path
    key: str
    name: str
    """SHARD/KEY."""
    members: dict[str, Member] = field(default_factory=dict)
    """By extension: what follows the key and a dot."""

    def load(self, params: SourceParams) -> Sample:
        """Return the sample. Raises CorruptRecord."""
        row = {}
        if "json" in self.members:
            row = parse_row(self.read("json"), name=self.name)
        if "txt" in self.members:
            try:
                row["text"] = self.read("txt").decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorruptRecord(self.name, f"has a caption that is not UTF-8 ({error})") from None
        pictures = [kind for kind in PICTURES if kind in self.members]
        if "conversations" in row or "text_list" in row:
            if len(pictures) == 1 and isinstance(row.get("image"), str):
                row["image"] = pictures[0]
        elif pictures:
            row["file_name"] = pictures[0]
        else:
            there = ", .".join(sorted(self.members))
            message = f"has no picture: it needs a .{', .'.join(PICTURES)} and has .{there}; "
            raise CorruptRecord(self.name, message + "a key ends at the first dot")
        return sample_of(row, params, name=self.name, find=self._find_picture)

    def read(self, extension: str) -> bytes:
        """Return the content of a member. Raises CorruptRecord."""
        member = self.members[extension]
        if member.content is not None:
            return member.content
        try:
            with self.shard.open("rb") as file:
                file.seek(member.offset)
                content = file.read(member.size)
        except OSError as error:
            raise CorruptRecord(self.name, f"cannot be read any more ({error})") from None
        if len(content) < member.size:
            raise CorruptRecord(self.name, f"has a .{extension} that is cut off")
        return content

    def _find_picture(self, file: str) -> bytes:
        """Return a picture that the JSON names, which is a member: KEY.0.jpg, or `0.jpg`. Raises CorruptRecord."""
        extension = file.removeprefix(f"{self.key}.").lower()
        if extension not in self.members:
            raise CorruptRecord(self.name, f"names {file!r}, which is not in its shard; pack it as {self.key}.{file}")
        return self.read(extension)


def list_records(shard: Path, name: str) -> tuple[list[ShardRecord], list[CorruptRecord]]:
    """Return the records of a shard, and every part of it that belongs to no record.

    KEY is a member's path up to the first dot of the file name, and its extension is what follows.
    """
    records: dict[str, ShardRecord] = {}
    lost: list[CorruptRecord] = []
    for member in read_archive(shard):
        if isinstance(member, Loss):
            lost.append(CorruptRecord(f"{name}:{member.offset}", str(member)))
            continue
        folder, slash, file = member.name.rpartition("/")
        first, _, extension = file.partition(".")
        key = folder + slash + first
        record = records.setdefault(key, ShardRecord(shard, key, f"{name}/{key}"))
        if not first or not extension:
            lost.append(CorruptRecord(f"{name}/{member.name}", "is not KEY.EXTENSION, so it belongs to no record"))
        elif extension.lower() in record.members:
            lost.append(CorruptRecord(f"{name}/{member.name}", "is in its shard twice; the first is used"))
        else:
            record.members[extension.lower()] = member
    return [record for record in records.values() if record.members], lost


@dataclass
class ShardSource(Source):
    """Records in shards: members KEY.jpg (or png, webp) beside KEY.txt or KEY.json with a caption or a conversation,
    or KEY.json with an interleaved document.

    Each epoch takes the shards in a new order, or draws as many, and shuffles within each.
    """

    params: SourceParams
    shards: list[Path]
    keep: Callable[[str], bool] = bool
    """Returns true if a name belongs to this source; default all do."""
    seed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """Not known before all shards are read."""

    def __post_init__(self) -> None:
        self._folder = os.path.commonpath([shard.parent for shard in self.shards])

    def _name(self, shard: Path) -> str:
        """Return the path of a shard below the folder that holds all of them: names in two folders may be equal."""
        return shard.relative_to(self._folder).as_posix()

    def loaded(self) -> Iterator[Loaded]:
        """Yield all records once, in order, usable or not; after those of a damaged shard, its damage."""
        for shard in self.shards:
            records, lost = list_records(shard, self._name(shard))
            for record in records:
                if self.keep(record.name):
                    yield load_or_corrupt(record.load, self.params)
            yield from lost

    def batches(self, data_slice: DataSlice) -> Iterator[list[Loaded]]:
        """Yield the slice's batches, without end; a batch's samples are followed by damaged shards met on the way."""
        damages: list[CorruptRecord] = []
        position = data_slice.positions(data_slice.start + data_slice.worker).start
        records = self._stream(position, damages)
        for step in data_slice.steps():
            wanted = data_slice.positions(step)
            skipped = wanted.start - position  # positions of other ranks and workers
            own = islice(records, skipped, skipped + len(wanted))
            loaded = [load_or_corrupt(record.load, self.params) for record in own]
            yield [*loaded, *damages]
            damages.clear()
            position = wanted.stop

    def _stream(self, skip: int, damages: list[CorruptRecord]) -> Iterator[ShardRecord]:
        """Yield the records of all epochs, without the first `skip`."""
        for epoch in count():
            order = epoch_order(len(self.shards), self.seed, epoch, self.params.resample)
            records_of_epoch = 0
            for i, shard in enumerate(order):
                listed, lost = list_records(self.shards[shard], self._name(self.shards[shard]))
                records = [record for record in listed if self.keep(record.name)]
                random.Random(f"{self.seed}/{epoch}/{i}").shuffle(records)
                damages += lost
                yield from records[skip:]
                skip = max(0, skip - len(records))
                records_of_epoch += len(records)
            if not records_of_epoch:
                raise ValueError(f"{str(self.shards[0])!r} and its like yield nothing any more; are they gone?")
