"""The files of what a run says about a few held-out pictures while it learns.

| file in captions/ | what it holds |
|---|---|
| watched.json | the pictures, which stay the same: file and true text of each |
| watched_<N>.png | a picture, small; written once |
| watched.jsonl | a row for the first step and each evaluation: step, a caption for each picture, what they took |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .folder import (
    NUMBER,
    GrowingFile,
    PathLike,
    Row,
    RowsWriter,
    Types,
    drop_rows,
    make_inner_folder,
    of_types,
    parse_rows,
    read_json,
    write_bytes,
    write_json,
)

FOLDER = "captions"
MAX_CAPTION = 200
"""Characters that are kept of a caption and of a true text."""
MAX_BYTES = 1 << 22
"""Bytes of rows that are read; of more, the newest."""
ROW_TYPES: Types = {"step": int, "captions": list, "seconds": NUMBER, "wire_bytes": NUMBER}
PICTURE_TYPES: Types = {"image": str, "truth": str}


class Watched(NamedTuple):
    """The watched pictures of a run, and what it has said about them so far. Somebody else may have written them."""

    pictures: list[Row]
    """image, the file's name in the run folder, and truth."""
    rows: list[Row]
    """step and captions, a text for each picture; and, if known, seconds and wire_bytes of rank 0."""


def rows_path(folder: PathLike) -> Path:
    """Return the path of the captions."""
    return Path(folder) / FOLDER / "watched.jsonl"


def pictures_path(folder: PathLike) -> Path:
    """Return the path of the list of pictures."""
    return Path(folder) / FOLDER / "watched.json"


def write_pictures(folder: PathLike, pictures: Sequence[bytes], truths: Sequence[str]) -> None:
    """Write the pictures, each as a PNG file, and their list. Raises OSError for a link in place of the folder."""
    make_inner_folder(Path(folder) / FOLDER)
    rows = []
    for index, (picture, truth) in enumerate(zip(pictures, truths, strict=True)):
        name = f"{FOLDER}/watched_{index}.png"
        write_bytes(Path(folder) / name, picture)
        rows.append({"image": name, "truth": truth[:MAX_CAPTION]})
    write_json(pictures_path(folder), {"pictures": rows})


def captions_writer(folder: PathLike, *, after: int) -> RowsWriter:
    """Return what appends captions, after those of a step; rows of later steps are removed first."""
    return RowsWriter(rows_path(folder), after=after)


def drop_captions(folder: PathLike, *, after: int) -> None:
    """Remove the captions of later steps."""
    drop_rows(rows_path(folder), after=after)


def read_watched(folder: PathLike) -> Watched:
    """Return what a run has said so far; without pictures or rows where there is nothing that can be shown."""
    listed = (read_json(pictures_path(folder)) or {}).get("pictures")
    pictures = [of_types(each, PICTURE_TYPES) for each in (listed if isinstance(listed, list) else ()) if _is_row(each)]
    rows = []
    for row in parse_rows(GrowingFile(rows_path(folder)).read(MAX_BYTES, newest=True)):
        row = of_types(row, ROW_TYPES)
        captions = row.get("captions", ())
        if "step" in row and len(captions) == len(pictures) and all(isinstance(text, str) for text in captions):
            rows.append(row)
    return Watched(pictures, rows)


def _is_row(value: object) -> bool:
    return isinstance(value, dict)
