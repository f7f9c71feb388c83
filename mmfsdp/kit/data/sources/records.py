"""Records of rows: an index of where each row is, split into train and held out. A row is parsed when it is loaded.

Rows come from JSON, tables and folders of pictures (find_files.py).
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ....params import DataParams, DataSource, SourceParams
from ..batch import Sample
from ..corrupt import CorruptRecord, shorten
from ..pictures import stable_hash
from ..rows.row_pictures import picture_name
from ..rows.row_values import MAX_FILE_NAME
from ..rows.rows import check_file_name, check_row, has_system, has_turns, keys_not_read, sample_of
from ..rows.unread import is_set, unread_note
from .find_files import find_all_files
from .first_bytes import what_it_is
from .json_rows import JsonLines
from .parquet import CACHE_BYTES
from .picture_folder import unread_pictures_note
from .row_files import FoundRow, RowFile
from .splits import (
    HELD_OUT,
    TRAIN,
    check_heldout,
    check_published,
    heldout_limit,
    heldout_split,
    published_split,
    sides_of,
    splits_note,
)
from .stream import Blocks, IndexedSource, Loaded, Source, load_or_corrupt

PLAIN_NAME = re.compile(r"[\w-][\w .-]*(/[\w-][\w .-]*)*")
"""A relative path as nearly all are, without `.`, `..`, drives and empty parts."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row with what names it; its pictures are not loaded."""

    name: str
    where: str
    """Its place in its file, where other rows may share its name; see `Sample.where`."""
    group: str
    """Name that rows about the same picture share: they are held out together."""
    split: str
    """The published split that it belongs to, by the names of its file and folders; "" if they name none."""
    row: dict[str, Any]


def describe(file: RowFile, found: FoundRow, params: SourceParams, *, is_whole: bool = True) -> Record:
    """Return the record of a row. Raises CorruptRecord if it is none, or names no usable picture.

    is_whole: the row has all its keys. Otherwise its picture may be in the row itself, under the name that it once had.
    """
    key, where, content = found
    if isinstance(content, CorruptRecord):
        raise content
    name = f"{file.relative}:{key}"
    try:
        row = content if isinstance(content, dict) else check_row(content, name=name)
        picture = picture_name(row)
        if picture and is_whole:
            picture = picture_inside(file.pictures, name, picture)
    except CorruptRecord as error:
        raise error.at(where) from None
    folder = str(file.relative).rpartition("/")[0] or "."
    group = name
    if picture:
        group = picture if folder == "." else f"{folder}/{picture}"
    if file.split is not None:
        split = file.split
    elif params.source is DataSource.FOLDER:
        split = _split_of_folder(group.rpartition("/")[0] if picture else folder)
    else:
        split = _split_of_file(file.relative)
    if file.named_by_picture and picture and "conversations" not in row:
        name, where = group, name if key else ""  # a line with a caption is named by its picture
    elif file.named_by_picture and row.get("id") is not None:
        where = f"id {shorten(str(row['id']))}"
    return Record(name, where, group, split, row)


@lru_cache(1024)
def _split_of_folder(folder: str) -> str:
    return published_split(PurePosixPath(folder))


@lru_cache(1024)
def _split_of_file(file: PurePosixPath) -> str:
    return published_split(file.parent, file.name)


def picture_inside(folder: Path, name: str, file: str) -> str:
    """Return the path of a picture below a folder, for one that is relative to it or absolute and in it.

    Raises CorruptRecord for record `name` if it is none.
    """
    is_plain = len(file) <= MAX_FILE_NAME and PLAIN_NAME.fullmatch(file)
    if not is_plain or "." not in file:  # base64 has no dot
        check_file_name(file, name=name)
    if is_plain:
        return file
    path, words = PurePosixPath(file.replace("\\", "/")), ""
    if path.is_absolute() and ".." not in path.parts and path.is_relative_to(Path(folder).absolute()):
        path = path.relative_to(Path(folder).absolute())
    if path.is_absolute() or PureWindowsPath(file).drive:
        words = "an absolute path"
    elif ".." in path.parts:
        words = "which leads out of the folder of the pictures"
    if words:
        fix = "write it relative to the folder of the pictures (data.pictures, or else the folder of the file)"
        raise CorruptRecord(name, f"names {shorten(file)!r}, {words}; {fix}")
    return path.as_posix()


def kind_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows share that have the same keys set, to values of the same types: they have one shape."""
    kind: list[Any] = []
    for key, value in row.items():
        if is_set(value):
            inner = value[0] if isinstance(value, list) else None
            kind += (key, type(value), type(inner))
    return tuple(kind)


def texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a row, however deep: a row names a picture under some key of its shape."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def paths_named(file: RowFile, row: dict[str, Any]) -> Iterator[str]:
    """Yield what may be the path of a picture in a row, below the folder that holds all files."""
    for text in texts_of(row):
        if len(text) <= MAX_FILE_NAME:
            yield os.path.normpath(file.relative.parent / text.strip().replace("\\", "/"))


class Records:
    """The rows that can be used, as their places in their files: 13 bytes for each, beside what the files keep."""

    def __init__(self, params: SourceParams, files: Sequence[RowFile]):
        self.params = params
        self.files = files
        self.file_of = np.empty(0, np.uint32)
        """(N,) the file of each record."""
        self.row_of = np.empty(0, np.uint32)
        """(N,) its row there."""
        self.group_hash = np.empty(0, np.uint32)
        """(N,) `stable_hash` of its group."""
        self.split_code = np.empty(0, np.uint8)
        """(N,) its published split, as an index of `split_names`."""
        self.split_names: list[str] = []
        self.has_turns = False
        self.has_system = False
        self.notes: list[str] = []

    def __len__(self) -> int:
        return len(self.row_of)

    def scan(self, skipped: dict[str, str], *, names: bool = False) -> set[int]:
        """Read all rows once, and learn which can be used; `skipped` gets label and reason of the others.

        names: also return the hashes of all paths that rows name. Raises ParamError for a file that
        cannot be read.
        """
        unread: set[str] = set()
        kinds: set[Any] = set()
        named: set[int] = set()
        parts: list[list[np.ndarray]] = []
        for number, file in enumerate(self.files):
            for record in self._scan_file(number, file, skipped, parts):
                if not file.scans_whole_rows:
                    continue
                # Rows of one kind have the same unread keys: few kinds are looked at, and not a million rows.
                kind = kind_of(record.row)
                if kind not in kinds:
                    kinds.add(kind)
                    unread |= keys_not_read(record.row)
                self.has_turns = self.has_turns or has_turns(record.row)
                self.has_system = self.has_system or has_system(record.row)
                if names:
                    named.update(map(hash, paths_named(file, record.row)))
            for row in file.first_rows():
                unread |= keys_not_read(row)
                self.has_turns = self.has_turns or has_turns(row)
                self.has_system = self.has_system or has_system(row)
            self.notes += file.notes()
        if parts:
            self.file_of, self.row_of, self.group_hash, codes = map(np.concatenate, zip(*parts, strict=True))
            self.split_code = codes.astype(np.uint8)
        self.notes += unread_note([unread])
        return named

    def _scan_file(
        self, number: int, file: RowFile, skipped: dict[str, str], parts: list[list[np.ndarray]]
    ) -> Iterator[Record]:
        """Yield the records of a file, and then add what is kept of them to `parts`."""
        rows, groups, names, splits = array("I"), array("I"), array("I"), array("B")
        for i, found in enumerate(file.scan()):
            try:
                record = describe(file, found, self.params, is_whole=file.scans_whole_rows)
            except CorruptRecord as error:
                skipped[error.label] = error.reason
                continue
            if record.split not in self.split_names:
                self.split_names.append(record.split)
            rows.append(i)
            groups.append(stable_hash(record.group))
            splits.append(self.split_names.index(record.split))
            if not file.scans_whole_rows:
                names.append(stable_hash(record.name))
            yield record
        # Rows of one group would all land on one side of the split.
        if len(names) > 1 and len(set(groups)) == 1:
            groups = names  # pictures in the rows themselves, which all have the same name
        columns = [np.array(column, np.uint32) for column in (rows, groups, splits)]
        parts.append([np.full(len(rows), number, np.uint32), *columns])

    def select(self, chosen: np.ndarray) -> Records:
        """Return the records where `chosen` (N,) is true, in the same order."""
        selected = Records(self.params, self.files)
        for name in ("file_of", "row_of", "group_hash", "split_code"):
            setattr(selected, name, getattr(self, name)[chosen])
        selected.split_names = self.split_names
        selected.has_turns, selected.has_system = self.has_turns, self.has_system
        return selected

    def blocks(self) -> Blocks | None:
        """Return the blocks in which all records are read; None if each is read by itself."""
        # Only Parquet has blocks: rows of a group are read together, or each would read all of it.
        sizes = np.concatenate([file.block_bytes for file in self.files])
        if not sizes.any():
            return None
        blocks = np.empty(len(self), np.int64)
        before = 0
        for number, file in enumerate(self.files):
            own = self.file_of == number
            blocks[own] = before + file.block_of(self.row_of[own])
            before += len(file.block_bytes)
        return Blocks(blocks, sizes, at_a_time=CACHE_BYTES // 2)

    def record(self, index: int) -> Record:
        """Return a record, read again. Raises CorruptRecord."""
        file = self.files[self.file_of[index]]
        row = int(self.row_of[index])
        try:
            found = file.read(row)
        except (OSError, ValueError) as error:
            name = f"{file.relative.as_posix()}:{row}"
            raise CorruptRecord(name, f"cannot be read ({error})") from None
        return describe(file, found, self.params)

    def load(self, index: int) -> Sample:
        """Return a sample. Raises CorruptRecord."""
        file = self.files[self.file_of[index]]
        record = self.record(index)

        def find(picture: str) -> Path:
            return file.pictures / picture_inside(file.pictures, record.name, picture)

        try:
            sample = sample_of(record.row, self.params, name=record.name, find=find)
        except CorruptRecord as error:
            raise error.at(record.where) from None
        return replace(sample, where=record.where)

    def loaded(self) -> Iterator[Loaded]:
        """Yield every sample in order, or why it cannot be used."""
        for index in range(len(self)):
            yield load_or_corrupt(self.load, index)


def open_records(params: DataParams, *, image_size: int, seed: int) -> dict[str, Source]:
    """Return the training and the held-out records; both know all that cannot be used. See sources.py."""
    records, skipped = read_records(params)
    return split_records(records, params, skipped, seed)


def read_records(params: SourceParams) -> tuple[Records, dict[str, str]]:
    """Return the records of files, and label to reason of the rows that cannot be used.

    Raises ParamError if there is no such file, or one is something else.
    """
    found = find_all_files(params)
    skipped: dict[str, str] = {}
    for file in found.files:
        if isinstance(file, JsonLines) and not file.path.stat().st_size:
            skipped[file.relative.as_posix()] = what_it_is(b"")
    records = Records(params, found.files)
    named = records.scan(skipped, names=bool(found.pictures))
    found.notes += unread_pictures_note(found.pictures, named)
    records.notes += [f"{params.path!r}: {note}" for note in found.notes]
    return records, skipped


def split_records(records: Records, params: DataParams, skipped: dict[str, str], seed: int) -> dict[str, Source]:
    """Return the training and the held-out records as sources. See `open_splits`.

    Raises ParamError if one of them has no usable record.
    """
    notes = list(records.notes)
    published = {records.split_names[code] for code in np.unique(records.split_code)}
    heldout = heldout_split(published, params)
    if heldout:
        side_of = sides_of(published, heldout)
        side_of_record = np.array([side_of.get(split, "") for split in records.split_names], str)[records.split_code]
        sides = {side: records.select(side_of_record == side) for side in (TRAIN, HELD_OUT)}
        check_published(sides[TRAIN].loaded(), TRAIN, params.path, skipped)
        check_heldout(sides[HELD_OUT].loaded(), heldout, params, skipped)
        notes += splits_note(params, side_of, heldout)
    else:
        limit = heldout_limit(zip(records.group_hash.tolist(), records.loaded(), strict=True), params, skipped)
        # By the hash of the group: adding rows moves no other row to the other side.
        is_heldout = records.group_hash < limit
        sides = {TRAIN: records.select(~is_heldout), HELD_OUT: records.select(is_heldout)}
    splits: dict[str, Source] = {}
    for side, own in sides.items():
        source = IndexedSource(own.load, len(own), seed, params.resample, dict(skipped), list(notes))
        source.blocks = own.blocks()
        source.has_turns, source.has_system = records.has_turns, records.has_system
        splits[side] = source
    return splits
