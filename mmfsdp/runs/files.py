"""Files that another process may read while they are written, and may find half-written after a crash."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

PathLike = str | os.PathLike[str]

CHUNK = 8 << 20
"""Bytes of metrics that are held at once; a line without end is damage and skipped."""


def write_text(path: PathLike, text: str) -> None:
    """Write a whole file at once: readers see the old text or the new one, also after a crash."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_json(path: PathLike, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: PathLike) -> dict[str, Any] | None:
    """The JSON object in a file, or None where there is no such file or it holds something else."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def metrics_path(folder: PathLike, rank: int = 0) -> Path:
    """Where a rank's metrics are."""
    return Path(folder) / (f"metrics-rank{rank}.jsonl" if rank else "metrics.jsonl")


class MetricsWriter:
    """Appends one JSON line per row to a rank's metrics, visible to readers as soon as it is written."""

    def __init__(self, folder: PathLike, rank: int = 0):
        self._file = open(metrics_path(folder, rank), "a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - 1))
        if self._file.read(1) not in (b"", b"\n"):  # a crash has left half a line: nothing may be glued to it
            self._file.write(b"\n")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row of plain values, in one system call. Numbers of other libraries become floats."""
        self._file.write(json.dumps(row, default=float).encode() + b"\n")

    def close(self) -> None:
        """No more rows."""
        self._file.close()


def read_metrics(
    folder: PathLike, rank: int = 0, offset: int = 0, *, limit: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The whole rows of a rank from byte `offset` on (below 0: from the end), and the offset to go on from.

    Half a line at the end is left for the next call, damaged lines are skipped, and a file that has become shorter is
    read from its start. With `limit` (bytes) one call reads no more than that. A missing file has no rows.
    """
    rows: list[dict[str, Any]] = []
    try:
        file = open(metrics_path(folder, rank), "rb")
    except FileNotFoundError:
        return rows, 0
    with file:
        size = os.fstat(file.fileno()).st_size
        offset = max(0, size + offset) if offset < 0 else 0 if size < offset else offset
        while True:
            file.seek(offset)
            data = file.read(limit or CHUNK)
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == (limit or CHUNK) else 0)
            rows += [row for line in data[:end].splitlines() if (row := _row(line)) is not None]
            offset += end
            if limit or not end:
                return rows, offset


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
