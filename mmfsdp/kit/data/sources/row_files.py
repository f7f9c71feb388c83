"""RowFile: the rows of a file by their places in it. The kinds of files are in json_rows.py, csv_rows.py, ..."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..corrupt import CorruptRecord

FoundRow = tuple[str, str, Any]
"""Name of a row (its line, id or index; "" where its picture has it), its place where others may share that, and the
row or why it is none."""

FIRST_ROWS = 100
"""Rows of a file that are read to open it, to say which keys nobody reads."""


def named_by_id(i: int, row: dict[str, Any]) -> FoundRow:
    """Return a row under its id, if it has one, else under its number."""
    if row.get("id") is not None:
        return str(row["id"]), f"row {i}", row
    return str(i), "", row


class RowFile(ABC):
    """Rows of a file (or of several), in a fixed order. Kept are their places, not the rows.

    `scan` reads all once, in order, and learns their places; then `read` gives each by its number in that order.
    """

    pictures: Path
    """The folder of the pictures that rows name."""
    relative: PurePosixPath
    """The path of the file below the folder that holds all files of the source."""
    format: str
    """The kind of file, in words."""
    split: str | None = None
    """The published split of all its rows. None: as names of files and folders say."""
    named_by_picture = False
    """True if a row with a caption is named by its picture. Otherwise by its file, and its id or its number."""
    scans_whole_rows = True
    """True if `scan` yields all keys of a row, not only those that name its pictures."""

    block_bytes: np.ndarray
    """(B,) bytes that a process keeps to read rows of a block; 0 where rows are read one by one."""

    def __init__(self, path: Path):
        self.path = path
        self.block_bytes = np.zeros(1, np.int64)
        self.pictures = path.parent
        self.relative = PurePosixPath(path.name)

    @abstractmethod
    def scan(self) -> Iterator[FoundRow]:
        """Yield all rows in order. Raises ParamError for a file that is something else."""

    @abstractmethod
    def read(self, i: int) -> FoundRow:
        """Return the row of that number, as `scan` has yielded it. Raises OSError if the file cannot be read."""

    def first_rows(self) -> list[dict[str, Any]]:
        """Return the first rows whole, where `scan` does not yield whole ones."""
        return []

    def notes(self) -> list[str]:
        """Return what a person should know of the file."""
        return []

    def block_of(self, rows: np.ndarray) -> np.ndarray:
        """Return (N,) the block of each row: rows of a block are read together."""
        return np.zeros(len(rows), np.int64)

    def checked(self, key: str, where: str, check: Callable[[str], Any]) -> Any:
        """Return what `check` makes of a row under its name, or the CorruptRecord that it raises."""
        try:
            return check(f"{self.relative.as_posix()}:{key}")
        except CorruptRecord as error:
            # A traceback would keep the frames, and with them the text of the file, as long as the error is kept.
            return error.at(where).with_traceback(None)


@dataclass
class FoundFiles:
    """The files of rows that a path names."""

    root: Path
    """The folder that holds all of them."""
    files: list[RowFile]
    notes: list[str] = field(default_factory=list)
    """Notes on what was not read, and on how it was found what is."""
    pictures: list[str] = field(default_factory=list)
    """Pictures that lie there, by their paths as rows should name them."""


class Ranges:
    """Ranges of bytes, 16 bytes for each."""

    def __init__(self) -> None:
        self._bounds = array("q")

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def add(self, start: int, end: int) -> None:
        """Add a range."""
        self._bounds.append(start)
        self._bounds.append(end)

    def __getitem__(self, i: int) -> tuple[int, int]:
        return self._bounds[2 * i], self._bounds[2 * i + 1]


class Strings:
    """Texts, kept as their bytes: a list of many short ones takes several times as much memory."""

    def __init__(self, texts: Iterable[str]):
        self._ends = array("q")
        kept = bytearray()
        for text in texts:
            kept += text.encode("utf-8", "surrogateescape")
            self._ends.append(len(kept))
        self._bytes = bytes(kept)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:
        start = self._ends[i - 1] if i else 0
        return self._bytes[start : self._ends[i]].decode("utf-8", "surrogateescape")
