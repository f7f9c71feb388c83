"""Records named by JSON: a folder of pictures with `metadata.jsonl` (the Hugging Face imagefolder convention), LLaVA
conversations, COCO captions, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from braceexpand import braceexpand

from ..params import DataParams, DataSource, ParamError, SourceParams
from .batch import Sample
from .corrupt import CorruptRecord, shorten
from .first_bytes import START_BYTES, what_it_is
from .rows import check_file_name, check_row, has_turns, keys_not_read, parse_row, picture_name, sample_of
from .splits import (
    HELD_OUT,
    TRAIN,
    check_published,
    heldout_limit,
    is_in_split,
    published_heldout,
    published_split,
    side_of,
    splits_note,
)
from .stream import IndexedSource, Source, load_or_corrupt
from .unread import unread_note

METADATA = "metadata.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """A row of JSON; its pictures are not loaded yet."""

    name: str
    where: str
    """Its place in its file, where other rows may share its name; see `Sample.where`."""
    group: str
    """Name that rows about the same picture share: they are held out together."""
    split: str
    """The published split that it belongs to, by the names of its file and folders; "" if they name none."""
    row: dict[str, Any]
    pictures: Path
    """The folder of the pictures that it names."""
    params: SourceParams

    def load(self) -> Sample:
        """Return the sample. Raises CorruptRecord."""
        find = partial(path_inside, self.pictures, self.name)
        try:
            sample = sample_of(self.row, self.params, name=self.name, find=find)
        except CorruptRecord as error:
            raise error.at(self.where) from None
        return replace(sample, where=self.where)


def path_inside(folder: Path, name: str, file: str) -> Path:
    """Return the path of a relative name inside a folder. Raises CorruptRecord for record `name` if it is none."""
    check_file_name(file, name=name)
    path, words = PurePosixPath(file.replace("\\", "/")), ""
    if path.is_absolute() or PureWindowsPath(file).drive:
        words = "an absolute path"
    elif ".." in path.parts:
        words = "which leads out of the folder of the pictures"
    if words:
        fix = "write it relative to the folder of the pictures (data.pictures, or else the folder of the file)"
        raise CorruptRecord(name, f"names {shorten(file)!r}, {words}; {fix}")
    return folder / path


def expand_path(path: str, *suffixes: str) -> list[Path]:
    """Return the files of a path: braces ({000..011}), wildcards, or a folder's files with one of `suffixes`.

    Raises ParamError.
    """
    folder = Path(path).expanduser()
    files = []
    if folder.is_dir():
        files = sorted(file for file in folder.iterdir() if file.name.lower().endswith(suffixes))
    elif folder.exists():
        files = [folder]
    else:
        try:
            patterns = list(braceexpand(str(folder), escape=False))
        except ValueError:  # unbalanced: a folder may have a brace in its name
            patterns = [str(folder)]
        for pattern in patterns:
            names = sorted(glob(pattern)) if any(letter in pattern for letter in "*?[") else [pattern]
            files += [Path(name) for name in names]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        kind = suffixes[0]
        not_found = f": {', '.join(missing[:3])} of {len(files)} not found" if missing else ""
        message = f"{path!r} names no {kind} file here{not_found}; give local files, as parts/{{000..011}}{kind}"
        raise ParamError("path", message)
    return files


def open_records(params: DataParams, *, image_size: int, seed: int) -> dict[str, Source]:
    """Return the training and the held-out records; both know all that cannot be used. See sources.py."""
    records, skipped = read_records(params)
    notes = unread_note(map(keys_not_read, (record.row for record in records)))
    published = {record.split for record in records}
    heldout = published_heldout(published, params.path)
    sides: dict[str, list[Record]] = {TRAIN: [], HELD_OUT: [], "": []}
    if heldout:
        for record in records:
            sides[side_of(record.split, heldout)].append(record)
        check_published((load_or_corrupt(r.load) for r in sides[TRAIN]), TRAIN, params.path, skipped)
        check_published((load_or_corrupt(r.load) for r in sides[HELD_OUT]), heldout, params.path, skipped)
        notes.append(splits_note(params.path, published, heldout))
    else:
        limit = heldout_limit(((r.group, load_or_corrupt(r.load)) for r in records), params, skipped)
        for record in records:
            side = HELD_OUT if is_in_split(limit, HELD_OUT, record.group) else TRAIN
            sides[side].append(record)
    turns = any(has_turns(record.row) for record in records)
    splits: dict[str, Source] = {}
    for split in (TRAIN, HELD_OUT):
        own = sides[split]
        source = IndexedSource(partial(_load, own), len(own), seed, params.resample, dict(skipped), list(notes))
        source.has_turns = turns
        splits[split] = source
    return splits


def _load(records: list[Record], index: int) -> Sample:
    return records[index].load()


def read_records(params: SourceParams) -> tuple[list[Record], dict[str, str]]:
    """Return the records of JSON files, and label to reason of the rows and lines that cannot be used.

    Source folder: every metadata.jsonl in and below a folder, each line a JSON object with `file_name`, relative to the
    metadata file, and `text`. Otherwise .json and .jsonl files: lists or lines of rows, or COCO captions. Raises
    ParamError if there is no such file, or a .json one is not JSON.
    """
    assert params.path is not None
    if params.source is DataSource.FOLDER:
        root = Path(os.path.expanduser(params.path))
        files = sorted(file for file in root.rglob(METADATA) if file.is_file())
        if not files:
            message = f"{params.path!r} is no folder with a {METADATA}; write one of a line "
            raise ParamError("path", message + '{"file_name": ..., "text": ...} per picture')
    else:
        files = expand_path(params.path, ".jsonl", ".json")
        root = Path(os.path.commonpath([file.parent for file in files]))
    records: list[Record] = []
    skipped: dict[str, str] = {}
    for file in files:
        relative = file.relative_to(root)
        if file.suffix == ".jsonl":
            rows = _lines(file)
            if file.stat().st_size == 0:
                skipped[relative.as_posix()] = what_it_is(b"")
        else:
            rows = _rows(file)
        pictures = Path(os.path.expanduser(params.pictures)) if params.pictures else file.parent
        for key, where, row in rows:
            try:
                records.append(_record(params, relative, pictures, key, where, row))
            except CorruptRecord as error:
                skipped[error.label] = error.reason
    return records, skipped


def _lines(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the number, an empty place and the bytes of each line that is not empty.

    Raises ParamError for a file that is something else.
    """
    with file.open("rb") as lines:
        known = what_it_is(lines.read(START_BYTES) or b"{")
        if known:
            raise ParamError("path", f"{str(file)!r} is no JSON lines: it {known}")
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield str(number), "", line


def _rows(file: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the id, or else the index, the place in the file and the row of each record of a .json file."""
    text = file.read_bytes()
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        known = what_it_is(text[:START_BYTES])
        words = f": it {known}" if known else f" ({error}); JSON lines must be in a .jsonl file"
        raise ParamError("path", f"{str(file)!r} is not JSON{words}") from None
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        yield from _coco_rows(file, content)
    elif isinstance(content, list):
        for i, row in enumerate(content):
            has_id = isinstance(row, dict) and row.get("id") is not None
            yield (str(row["id"]), f"row {i}", row) if has_id else (str(i), "", row)
    else:
        raise ParamError("path", f"{str(file)!r} holds neither a list of rows nor COCO's images and annotations")


def _coco_rows(file: Path, content: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield a row for each annotation of COCO's captions."""
    try:
        files = {image["id"]: image["file_name"] for image in content["images"]}
        for i, note in enumerate(content["annotations"]):
            row = {key: value for key, value in note.items() if key not in ("id", "image_id")}
            yield str(note["id"]), f"row {i}", row | {"file_name": files.get(note["image_id"])}
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{str(file)!r} is not as COCO's: images need id and file_name, annotations id and image_id"
        raise ParamError("path", f"{message} ({type(error).__name__}: {error})") from None


def _record(params: SourceParams, file: Path, pictures: Path, key: str, where: str, row: Any) -> Record:
    """Return the record of a row, or of the bytes of a line. Raises CorruptRecord if it names no usable picture."""
    name = f"{file.as_posix()}:{key}"
    folder = PurePosixPath(file.parent.as_posix())
    is_line = isinstance(row, bytes)
    try:
        content = parse_row(row, name=name) if is_line else check_row(row, name=name)
        picture = picture_name(content)
        if picture:
            path_inside(pictures, name, picture)
    except CorruptRecord as error:
        raise error.at(where) from None
    group = (folder / picture.replace("\\", "/")).as_posix() if picture else name
    if params.source is DataSource.FOLDER:
        split = published_split(PurePosixPath(group).parent if picture else folder)
    else:
        split = published_split(folder, file.name)
    if is_line and picture and "conversations" not in content:
        name, where = group, name  # a line with a caption is named by its picture
    elif is_line and content.get("id") is not None:
        where = f"id {shorten(str(content['id']))}"
    return Record(name, where, group, split, content, pictures, params)
