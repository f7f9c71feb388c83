"""Records named by JSON: a folder of pictures with `metadata.jsonl` (the Hugging Face imagefolder convention), LLaVA
conversations, COCO captions, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any

from braceexpand import braceexpand

from ..params import DataSource, ParamError, SourceParams
from .batch import Sample
from .pictures import CorruptRecord
from .rows import check_row, parse_row, picture_name, sample_of

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Record:
    """A row of JSON; its pictures are not loaded yet."""

    name: str
    group: str
    """Name that rows about the same picture share: they are held out together."""
    row: dict[str, Any]
    pictures: Path
    """The folder of the pictures that it names."""
    params: SourceParams

    def load(self) -> Sample:
        """Return the sample. Raises CorruptRecord."""
        return sample_of(self.row, self.params, name=self.name, find=partial(path_inside, self.pictures, self.name))


def path_inside(folder: Path, name: str, file: str) -> Path:
    """Return the path of a relative name inside a folder. Raises CorruptRecord for record `name` if it leads out."""
    path = PurePosixPath(file.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise CorruptRecord(name, f"names {file!r}, which leads out of the folder")
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


def read_records(params: SourceParams) -> tuple[list[Record], dict[str, str]]:
    """Return the records of JSON files, and name to reason of the rows and lines that cannot be used.

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
    records, skipped = [], {}
    for file in files:
        relative = file.relative_to(root)
        pictures = Path(os.path.expanduser(params.pictures)) if params.pictures else file.parent
        for key, row in _lines(file) if file.suffix == ".jsonl" else _rows(file):
            name = f"{relative.as_posix()}:{key}"
            try:
                records.append(_record(params, relative, pictures, name, row))
            except CorruptRecord as error:
                skipped[error.name] = error.reason
    return records, skipped


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the number and the bytes of each line that is not empty."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield str(number), line


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the id, or else the index, and the row of each record of a .json file."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ParamError("path", f"{str(file)!r} is not JSON ({error}); JSON lines must be in a .jsonl file") from None
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        yield from _coco_rows(file, content)
    elif isinstance(content, list):
        for i, row in enumerate(content):
            yield str(row.get("id", i) if isinstance(row, dict) else i), row
    else:
        raise ParamError("path", f"{str(file)!r} holds neither a list of rows nor COCO's images and annotations")


def _coco_rows(file: Path, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a row for each annotation of COCO's captions."""
    try:
        files = {image["id"]: image["file_name"] for image in content["images"]}
        for note in content["annotations"]:
            yield str(note["id"]), {"file_name": files.get(note["image_id"]), "text": note.get("caption")}
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{str(file)!r} is not as COCO's: images need id and file_name, annotations id and image_id"
        raise ParamError("path", f"{message} ({type(error).__name__}: {error})") from None


def _record(params: SourceParams, file: Path, pictures: Path, name: str, row: Any) -> Record:
    """Return the record of a row, or of the bytes of a line. Raises CorruptRecord if it names no usable picture."""
    is_line = isinstance(row, bytes)
    content = parse_row(row, name=name) if is_line else check_row(row, name=name)
    picture = picture_name(content)
    if not picture:
        return Record(name, name, content, pictures, params)
    path_inside(pictures, name, picture)
    group = PurePosixPath(file.parent.as_posix(), picture.replace("\\", "/")).as_posix()
    if is_line and "conversations" not in content:
        name = group  # a line with a caption is named by its picture
    return Record(name, group, content, pictures, params)
