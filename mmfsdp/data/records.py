"""Records named by JSON: a folder of pictures with `metadata.jsonl` (the Hugging Face imagefolder convention), LLaVA
conversations, COCO captions, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ..params import ParamError, SourceParams
from .batch import Sample
from .files import expand
from .pictures import CorruptRecord
from .rows import checked, parse, picture_of, sample_of

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Line:
    """A line of a file, by the byte that it begins at."""

    file: Path
    start: int

    def read(self) -> bytes:
        """The line. Raises OSError."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.readline()


@dataclass(frozen=True)
class Record:
    """A row of JSON; its pictures are not loaded yet."""

    name: str
    group: str
    """What it shares with other rows about the same picture: they are held out together."""
    row: dict[str, Any] | Line
    pictures: Path
    """The folder that its file names start from."""
    params: SourceParams

    def load(self) -> Sample:
        """The sample. Raises CorruptRecord."""
        try:
            row = parse(self.row.read(), name=self.name) if isinstance(self.row, Line) else self.row
        except OSError as error:
            raise CorruptRecord(self.name, f"cannot be read any more ({error})") from None
        return sample_of(row, self.params, name=self.name, find=partial(inside, self.pictures, self.name))


def inside(folder: Path, name: str, file: str) -> Path:
    """A file below a folder, by the relative name that record `name` gives it. Raises CorruptRecord if it leads out."""
    path = PurePosixPath(file.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise CorruptRecord(name, f"names {file!r}, which leads out of the folder")
    return folder / path


def read_folder(params: SourceParams) -> tuple[list[Record], dict[str, str]]:
    """The records of every metadata.jsonl in a folder and below, and the lines that are none (name to reason).

    Each line is a JSON object with `file_name`, relative to the metadata file, and `text`; or as `read_json` takes
    them. Raises ParamError if there is no such file.
    """
    assert params.path is not None
    root = Path(os.path.expanduser(params.path))
    if not root.is_dir():
        raise ParamError("path", f"{params.path!r} is not a folder; name one that holds {METADATA} and pictures")
    files = sorted(file for file in root.rglob(METADATA) if file.is_file())
    if not files:
        raise ParamError(
            "path",
            f'{params.path!r} holds no {METADATA}; write one line {{"file_name": ..., "text": ...}} per picture',
        )
    return _records(params, root, files)


def read_json(params: SourceParams) -> tuple[list[Record], dict[str, str]]:
    """The records of .json and .jsonl files: lists or lines of rows, or COCO captions; and the rows that are none.

    Raises ParamError if a file is missing or, a .json one, is not JSON.
    """
    assert params.path is not None
    files = expand(params.path, ".jsonl", ".json")
    return _records(params, Path(os.path.commonpath([file.parent for file in files])), files)


def _records(params: SourceParams, root: Path, files: list[Path]) -> tuple[list[Record], dict[str, str]]:
    records, skipped = [], {}
    for file in files:
        where = file.relative_to(root)
        pictures = Path(os.path.expanduser(params.pictures)) if params.pictures else file.parent
        if not os.access(file, os.R_OK):
            raise ParamError("path", f"{str(file)!r} is not yours to read; ask its owner, or copy it")
        for name, row in _lines(where, file) if file.suffix == ".jsonl" else _rows(where, file):
            try:
                records.append(_record(params, where, pictures, name, row))
            except CorruptRecord as error:
                skipped[error.name] = error.reason
    return records, skipped


def _lines(where: Path, file: Path) -> Iterator[tuple[str, Line]]:
    """The lines that hold something, each named by its file and number."""
    start = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{where.as_posix()}:{number}", Line(file, start)
            start += len(line)


def _rows(where: Path, file: Path) -> Iterator[tuple[str, Any]]:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ParamError("path", f"{str(file)!r} is not JSON ({error}); JSON lines must be in a .jsonl file") from None
    if isinstance(found, dict) and {"images", "annotations"} <= found.keys():
        yield from _coco(where, found)
    elif isinstance(found, list):
        for i, row in enumerate(found):
            called = str(row.get("id", i) if isinstance(row, dict) else i)[:200]
            yield f"{where.as_posix()}:{called.encode(errors='backslashreplace').decode()}", row
    else:
        raise ParamError("path", f"{str(file)!r} holds neither a list of rows nor COCO's images and annotations")


def _coco(where: Path, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """COCO's captions: a row for each annotation."""
    try:
        files = {image["id"]: image["file_name"] for image in found["images"]}
        for note in found["annotations"]:
            name = f"{where.as_posix()}:{note['id']!a:.200}"
            yield name, {"id": note["id"], "file_name": files.get(note["image_id"]), "text": note.get("caption")}
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{where.as_posix()!r} is not as COCO's: images need id and file_name, annotations id and image_id"
        raise ParamError("path", f"{message} ({type(error).__name__}: {error})") from None


def _record(params: SourceParams, where: Path, pictures: Path, name: str, found: Any) -> Record:
    row = parse(found.read(), name=name) if isinstance(found, Line) else checked(found, name=name)
    group = name
    if file := picture_of(row):
        inside(pictures, name, file)
        group = PurePosixPath(where.parent.as_posix(), file.replace("\\", "/")).as_posix()
    elif not {"conversations", "text_list"} & row.keys():
        raise CorruptRecord(name, "has no file_name")
    alone = isinstance(found, Line) and group != name and "conversations" not in row
    return Record(group if alone else name, group, found, pictures, params)
