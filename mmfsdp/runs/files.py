"""Files that another process may read while they are written, and may find half-written after a crash."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PathLike = str | os.PathLike[str]

RESERVE = "reserve"
"""File in logs/ that is removed when something fails: on a full disk there is then room to say what."""

_ROOM = 1 << 18
"""Bytes of it."""

NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What opening a file raises where there is none of that name."""

NUMBERS = frozenset(("step", "steps", "rank", "time", "finished", "created", "step_s", "memory_bytes"))
NUMBERS |= {"wire_bytes", "peak_bytes", "samples", "loss"}
TEXTS = frozenset(("state", "status", "error", "reason", "traceback", "kind", "text"))
MAPPINGS = frozenset(("estimate", "skipped", "startup", "versions"))
"""What these keys hold in every file of a run, if they are there."""

CHUNK = 8 << 20
"""Bytes of metrics that are held at once; a line without end is damage and skipped."""


def write_text(path: PathLike, text: str) -> None:
    """Write a whole file at once: readers see the old text or the new one, also after a crash."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)  # of a full disk, half a file would keep the last room
        raise


def reserve(folder: PathLike) -> None:
    """Make sure that there is room in a run's folder to begin, and keep some. Raises OSError where there is none."""
    with open(Path(folder) / "logs" / RESERVE, "wb") as file:
        file.write(bytes(_ROOM + _ROOM // 4))
        file.flush()
        file.truncate(_ROOM)


def whose(path: PathLike, *, to_read: bool = False) -> str:
    """What a refusal to change something there, or to read it, is followed by: whose it is, or that the disk is
    read-only."""
    path = Path(path).absolute()
    for place in (path, *path.parents):
        try:
            stat, disk = place.lstat(), os.statvfs(place)
        except OSError:
            continue
        what = "it" if place == path else repr(str(place))
        if disk.f_flag & os.ST_RDONLY:
            return f"; {what} is on a read-only disk"
        if stat.st_uid == os.getuid():
            return f"; {what} is yours, but closed: chmod u+rwX {shlex.quote(str(place))}"
        with suppress(KeyError):
            return f"; {what} belongs to {place.owner()}{', who may open it by chmod -R go+rX' * to_read}"
        return f"; {what} belongs to user {stat.st_uid}"
    return ""


def refused(error: BaseException) -> str:
    """`whose` the file is that the system does not let a person read or write; nothing for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return whose(error.filename) if isinstance(error.filename, str) else ""


def is_full(folder: PathLike) -> bool:
    """Whether the disk of a run's folder has no room for what a run writes at its end."""
    try:
        return shutil.disk_usage(folder).free < 2 * _ROOM
    except OSError:
        return False


def write_json(path: PathLike, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: PathLike) -> dict[str, Any] | None:
    """The JSON object in a file, or None where there is no such file or it holds something else.

    Entries of other types than NUMBERS and TEXTS say are left out: everything in a run folder may be damaged.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (*NO_FILE, ValueError, RecursionError):
        return None
    return _sound(value) if isinstance(value, dict) else None


def metrics_path(folder: PathLike, rank: int = 0) -> Path:
    """Where a rank's metrics are."""
    return Path(folder) / (f"metrics-rank{rank}.jsonl" if rank else "metrics.jsonl")


class MetricsWriter:
    """Appends one JSON line per row to a rank's metrics, visible to readers as soon as it is written.

    With `after`, rows of later steps than that are dropped first: the run goes on from there.
    """

    def __init__(self, folder: PathLike, rank: int = 0, *, after: int | None = None):
        if after is not None:
            _forget(folder, rank, after)
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
    except NO_FILE:
        return rows, 0
    with file:
        size = os.fstat(file.fileno()).st_size
        offset = max(0, size + offset) if offset < 0 else 0 if size < offset else offset
        while True:
            file.seek(offset)
            data = file.read(limit or CHUNK)
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == (limit or CHUNK) else 0)
            rows += parse_rows(data[:end])
            offset += end
            if limit or not end:
                return rows, offset


def last_row(folder: PathLike, rank: int = 0) -> dict[str, Any]:
    """The newest row of a rank; {} if there is none."""
    rows, _ = read_metrics(folder, rank, offset=-20_000)
    return rows[-1] if rows else {}


def _forget(folder: PathLike, rank: int, after: int) -> None:
    rows, _ = read_metrics(folder, rank)
    kept = [row for row in rows if row.get("step", 0) <= after]
    if len(kept) < len(rows):
        write_text(metrics_path(folder, rank), "".join(json.dumps(row) + "\n" for row in kept))


class Beat:
    """A rank's sign of life: the time it was last written, and what the rank was then about to do."""

    def __init__(self, folder: PathLike, rank: int):
        path = beat_path(folder, rank)
        path.parent.mkdir(exist_ok=True)
        self._file = open(path, "wb", buffering=0)
        self.marks: list[tuple[str, float]] | None = []
        """What was said and when (unix seconds), until `started` is called: how a run began."""

    def __call__(self, doing: str) -> None:
        """Say what comes now, such as `step 5 compute`."""
        if self.marks is not None:
            self.marks.append((doing, time.time()))
        os.pwrite(self._file.fileno(), f"{doing:<40}\n".encode(), 0)

    def started(self) -> list[tuple[str, float]]:
        """What was said until now; nothing more is kept."""
        marks, self.marks = self.marks or [], None
        return marks


def beat_path(folder: PathLike, rank: int) -> Path:
    """Where a rank's signs of life are."""
    return Path(folder) / "logs" / f"rank{rank}.beat"


def parse_rows(lines: bytes) -> list[dict[str, Any]]:
    """The JSON objects in some lines; whatever else a line holds is damage, and skipped."""
    rows = []
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(_sound(row, MAPPINGS - {"skipped"}))  # there a step says whether it was
    return rows


def _sound(row: dict[str, Any], mappings: frozenset[str] = MAPPINGS) -> dict[str, Any]:
    for key, value in list(row.items()):
        if isinstance(value, dict):
            _sound(value, mappings)
        elif key in mappings:
            del row[key]
    for key in NUMBERS & row.keys():
        value = row[key]
        if not isinstance(value, (int, float)) or (key != "loss" and not -1e300 < value < 1e300):
            del row[key]
    for key in TEXTS & row.keys():
        if not isinstance(row[key], str):
            del row[key]
    return row
