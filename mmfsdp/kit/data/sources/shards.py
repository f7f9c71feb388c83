"""WebDataset shards (.tar, also compressed), read one after the other.

Every reader lists all records of a shard, and reads its own. A compressed shard is unpacked into memory for that.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path, PurePosixPath

from ....params import DataParams, ParamError, SourceParams
from ..batch import Sample
from ..corrupt import CorruptRecord, shorten
from ..media import FILM, FILM_SUFFIXES, PICTURE, PICTURE_SUFFIXES, media_of
from ..rows.rows import check_file_name, is_caption, keys_not_read, lacks_picture, parse_row, sample_of
from ..rows.unread import unread_note
from .archive import Loss, Member, read_archive
from .find_files import expand_path
from .first_bytes import START_BYTES, what_it_is
from .splits import (
    HELD_OUT,
    TRAIN,
    check_heldout,
    check_published,
    heldout_limit,
    heldout_split,
    is_in_split,
    named_split,
    published_split,
    sides_of,
    splits_note,
)
from .stream import DataSlice, Loaded, Source, at_epoch, epoch_order, load_or_corrupt

PICTURES = tuple(suffix.removeprefix(".") for suffix in PICTURE_SUFFIXES)
TEXTS = ("txt", "json")
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
"""Endings of the files that a folder of shards holds. Reading looks at a file's first bytes, not at its name, and names
one of zstd as lost."""


@dataclass
class ShardRecord:
    """The members KEY.* of a shard. Members of an uncompressed shard are not read yet."""

    shard: Path
    key: str
    name: str
    """SHARD/KEY."""
    members: dict[str, Member] = field(default_factory=dict)
    """Members by their extension: what follows the key and a dot."""
    unread: set[str] = field(default_factory=set)
    """Keys of its JSON, and endings of its members, that were not read when it was loaded."""

    def load(self, params: SourceParams) -> Sample:
        """Return the sample. Raises CorruptRecord."""
        self._check_members()
        row = {}
        if "json" in self.members:
            row = parse_row(self.read("json"), name=self.name)
        if "txt" in self.members:
            try:
                row["text"] = self.read("txt").decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorruptRecord(self.name, f"has a caption that is not UTF-8 ({error})") from None
        pictures = [kind for kind in PICTURES if kind in self.members]
        if not is_caption(row):
            # The JSON may have the name that the picture had before it was packed.
            if len(pictures) == 1 and (isinstance(row.get("image"), str) or lacks_picture(row)):
                row["image"] = pictures[0]
        elif len(pictures) == 1:
            row["file_name"] = pictures[0]
            row.pop("image", None)
        elif pictures:
            both = " and .".join(pictures)
            raise CorruptRecord(self.name, f"has .{both}, and a caption is of one picture; leave one out")
        else:
            raise CorruptRecord(self.name, self._no_picture())
        if not self.members.keys() & {*TEXTS}:
            there = ", .".join(sorted(self.members))
            raise CorruptRecord(self.name, f"has no caption: it needs a .txt or .json, and has .{there}")
        # What the sample asks for by `find` is used; the rest is told, as a picture that nobody sees would be a fault.
        used = {*TEXTS}

        def find(file: str) -> bytes:
            extension = self._extension_of(file)
            used.add(extension)
            return self.read(extension)

        sample = sample_of(row, params, name=self.name, find=find)
        for kind in pictures:
            if kind not in used:
                raise CorruptRecord(self.name, f"has .{kind}, which its JSON does not name under 'image'")
        others = sorted(self.members.keys() - used)
        for extension in others:
            if media_of(self.read(extension)) in (PICTURE, FILM):
                words = "which is a picture, a video or a sound, and is not read; leave the record out, or the member"
                raise CorruptRecord(self.name, f"has .{extension}, {words}")
        self.unread = keys_not_read(row) | {f".{extension}" for extension in others}
        return sample

    def _check_members(self) -> None:
        """Raise CorruptRecord for videos and sounds, and for the members of several samples whose keys have dots."""
        for extension in self.members:
            inner, _, kind = extension.rpartition(".")
            if f".{kind}" in FILM_SUFFIXES:
                words = "of video and sound nothing is read; leave the record out, or the member if it does without"
                raise CorruptRecord(self.name, f"has .{extension}: {words}")
            # KEY.0.jpg beside KEY.0.txt: two samples whose keys have a dot, joined to one by WebDataset's rule.
            text_beside = any(f"{inner}.{text}" in self.members for text in TEXTS)
            if inner and kind in PICTURES and text_beside:
                file = f"{self.key}.{extension}"
                fix = f"{self.key}.{inner}".replace(".", "_")
                words = f"a key ends at the first dot; rename its members, as {fix}.{kind}"
                raise CorruptRecord(self.name, f"is the key of {shorten(file)!r} and its text, too: {words}")

    def _no_picture(self) -> str:
        """Return why a record without a picture has none."""
        there = ", .".join(sorted(self.members))
        words = f"has no picture: it needs a .{', .'.join(PICTURES)} and has .{there}; a key ends at the first dot"
        for extension in sorted(self.members.keys() - {*TEXTS}):
            known = what_it_is(self.read(extension)[:START_BYTES])
            if known:
                words += f"; .{extension} {known}"
        return words

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

    def _extension_of(self, file: str) -> str:
        """Return the extension of a picture that the JSON names: KEY.0.jpg, or `0.jpg`. Raises CorruptRecord."""
        check_file_name(file, name=self.name)
        extension = file.removeprefix(f"{self.key}.").lower()
        if extension not in self.members:
            file = shorten(file)
            raise CorruptRecord(self.name, f"names {file!r}, which is not in its shard; pack it as {self.key}.{file}")
        return extension


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
            # Named, and not dropped: nothing in a shard is silently left out.
            lost.append(CorruptRecord(f"{name}/{member.name}", "is not KEY.EXTENSION, so it belongs to no record"))
        elif extension.lower() in record.members:
            where = f"byte {member.offset}"
            lost.append(CorruptRecord(f"{name}/{member.name}", "is in its shard twice; the first is used", where))
        else:
            record.members[extension.lower()] = member
    return [record for record in records.values() if record.members], lost


def open_shards(params: DataParams, *, image_size: int, seed: int) -> dict[str, Source]:
    """Return the training and the held-out records of shards. See sources.py."""
    assert params.path is not None
    shards = ShardSource.open(params, seed)
    published = {shards.split_of(shard) for shard in shards.shards}
    heldout = heldout_split(published, params)
    notes, sides = [], {}
    if heldout:
        side_of = sides_of(published, heldout)
        for side in (TRAIN, HELD_OUT):
            own = [shard for shard in shards.shards if side_of[shards.split_of(shard)] == side]
            sides[side] = replace(shards, shards=own)
        check_published(sides[TRAIN].loaded(), TRAIN, params.path, shards.skipped)
        check_heldout(sides[HELD_OUT].loaded(), heldout, params, shards.skipped)
        notes += splits_note(params, side_of, heldout)
    else:
        records = ((item.name, item) for item in shards.loaded())
        limit = heldout_limit(records, params, shards.skipped)
        for side in (TRAIN, HELD_OUT):
            sides[side] = replace(shards, keep=partial(is_in_split, limit, side))
    # Of the few records that were loaded to open the splits: a shard is not read as a whole before the run.
    notes += unread_note([set().union(shards.unread, *(side.unread for side in sides.values()))])
    opened = [shards, *sides.values()]
    splits: dict[str, Source] = {}
    for side, source in sides.items():
        splits[side] = replace(source, skipped=dict(shards.skipped), notes=list(notes))
        splits[side].has_turns = any(each.has_turns for each in opened)
        splits[side].has_system = any(each.has_system for each in opened)
    return splits


@dataclass
class ShardSource(Source):
    """Records in shards: members KEY.jpg (or png, webp) with KEY.txt, or KEY.json with a caption or a conversation,
    or KEY.json with an interleaved document.

    Each epoch takes the shards in a new order, or draws as many, and shuffles within each.
    """

    params: SourceParams
    shards: list[Path]
    keep: Callable[[str], bool] = bool
    """Returns true if a name belongs to this source; default all do."""
    seed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    length: int | None = None
    """The number of records, which nobody knows before all shards are read."""
    folder: Path = Path()
    """The folder that holds the shards of all splits: records have their names below it."""
    unread: set[str] = field(default_factory=set)
    """Keys that were not read in the records that `loaded` has loaded so far; see `ShardRecord.unread`."""
    heldout: frozenset[Path] = frozenset()
    """The shards that `params.heldout` names, where that is a path."""

    @classmethod
    def open(cls, params: SourceParams, seed: int) -> ShardSource:
        """Return the source of all records in the shards of `path` and `heldout`. Raises ParamError."""
        assert params.path is not None
        shards = expand_path(params.path, *SHARD_SUFFIXES)
        heldout: list[Path] = []
        if params.heldout is not None and not named_split(params.heldout):
            try:
                heldout = expand_path(params.heldout, *SHARD_SUFFIXES)
            except ParamError as error:
                raise ParamError("heldout", error.message) from None
            held_out = {shard.resolve() for shard in heldout}
            shards = [shard for shard in shards if shard.resolve() not in held_out]
            if not shards:
                message = f"{params.heldout!r} holds out all of path {params.path!r}; give other files for one of them"
                raise ParamError("heldout", message)
        folder = Path(os.path.commonpath([shard.parent.absolute() for shard in shards + heldout]))
        return cls(params, shards + heldout, seed=seed, folder=folder, heldout=frozenset(heldout))

    def _name(self, shard: Path) -> str:
        """Return the path of a shard below the folder that holds all of them: names in two folders may be equal."""
        return shard.absolute().relative_to(self.folder).as_posix()

    def split_of(self, shard: Path) -> str:
        """Return the published split that a shard belongs to by its name; "" if it names none."""
        if shard in self.heldout:
            return HELD_OUT
        path = PurePosixPath(self._name(shard))
        return published_split(path.parent, path.name)

    def loaded(self) -> Iterator[Loaded]:
        """Yield all records once, in order, usable or not; after the records of a damaged shard, its damage."""
        for shard in self.shards:
            records, lost = list_records(shard, self._name(shard))
            for record in records:
                if self.keep(record.name):
                    loaded = load_or_corrupt(record.load, self.params)
                    self.unread |= record.unread
                    if isinstance(loaded, Sample):
                        self.has_turns |= bool(loaded.more)
                        self.has_system |= bool(loaded.system)
                    yield loaded
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
            loaded = [at_epoch(load_or_corrupt(record.load, self.params), epoch) for epoch, record in own]
            yield [*loaded, *damages]
            damages.clear()
            position = wanted.stop

    def _stream(self, skip: int, damages: list[CorruptRecord]) -> Iterator[tuple[int, ShardRecord]]:
        """Yield (epoch, record) of all epochs, without the first `skip`."""
        for epoch in count():
            order = epoch_order(len(self.shards), self.seed, epoch, self.params.resample)
            records_of_epoch = 0
            for i, shard in enumerate(order):
                listed, lost = list_records(self.shards[shard], self._name(self.shards[shard]))
                records = [record for record in listed if self.keep(record.name)]
                # The same order on all ranks and workers: each takes its own positions of one stream.
                random.Random(f"{self.seed}/{epoch}/{i}").shuffle(records)
                damages += lost
                for record in records[skip:]:
                    yield epoch, record
                skip = max(0, skip - len(records))
                records_of_epoch += len(records)
            # Otherwise this would go round for ever.
            if not records_of_epoch:
                raise ValueError(f"{str(self.shards[0])!r} and its like yield nothing any more; are they gone?")
