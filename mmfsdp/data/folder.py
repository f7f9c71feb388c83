"""A folder of pictures with `metadata.jsonl`, the Hugging Face imagefolder convention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmfsdp.params import ParamError

from .batch import Sample
from .pictures import CorruptRecord, open_picture
from .processor import IMAGE

METADATA = "metadata.jsonl"


@dataclass(frozen=True)
class Record:
    """A line of metadata: a picture's place and its caption, nothing loaded yet."""

    name: str
    text: str
    file: Path

    def load(self) -> Sample:
        """The sample. Raises CorruptRecord if there is no caption or the picture cannot be decoded."""
        return caption_sample(self.name, self.text, self.file)


def caption_sample(name: str, text: str, picture: Path | bytes) -> Sample:
    """A picture with its caption. Raises CorruptRecord if either is missing or unusable."""
    if not text.strip():
        raise CorruptRecord(name, "has no caption")
    return Sample(prompt=IMAGE, text=text.strip(), images=(open_picture(picture, name=name),), name=name)


def caption_of(row: Mapping[str, Any]) -> str:
    """The caption in a row of JSON, under `text` or `caption`; empty if there is none."""
    text = row.get("text", row.get("caption"))
    return text if isinstance(text, str) else ""


def read_folder(path: str) -> tuple[list[Record], dict[str, str]]:
    """The records of every metadata.jsonl in a folder and below, and the lines that are none (name to reason).

    Each line is a JSON object with `file_name`, relative to the metadata file, and `text`. Raises ParamError if there
    is no such file.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise ParamError("data.path", f"{path!r} is not a folder; name one that holds {METADATA} and pictures")
    files = sorted(root.rglob(METADATA))
    if not files:
        raise ParamError(
            "data.path", f'{path!r} holds no {METADATA}; write one line {{"file_name": ..., "text": ...}} per picture'
        )
    records, skipped = [], {}
    for file in files:
        for name, line in _lines(root, file):
            try:
                records.append(_record(root, file, name, line))
            except CorruptRecord as error:
                skipped[error.name] = error.reason
    return records, skipped


def _lines(root: Path, file: Path) -> Iterator[tuple[str, str]]:
    """The lines that hold something, each named by its file and number."""
    where = file.relative_to(root).as_posix()
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if line.strip():
            yield f"{where}:{number}", line


def _record(root: Path, file: Path, where: str, line: str) -> Record:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptRecord(where, f"is not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str) or not row["file_name"].strip():
        raise CorruptRecord(where, "has no file_name")
    inside = PurePosixPath(file.parent.relative_to(root).as_posix(), row["file_name"].replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts:
        raise CorruptRecord(where, f"names {row['file_name']!r}, which leads out of the folder")
    return Record(inside.as_posix(), caption_of(row), root / inside)
