"""Reads the logs of a run as they are written.

Memory is bounded whatever the ranks write: long lines are cut, and a reader that falls behind skips to the newest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..runs import PathLike, log_paths
from ..runs.files import NO_FILE

MAX_LINE = 4000
"""Bytes of one line that are shown."""

_CONTROL = re.compile(
    r"(\x1b\[[0-9;]{0,32}m)"  # a color: kept
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other control sequences
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # window titles, links and the like, with their text
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""What is left of control sequences in a clean line."""
_ERROR = r"\b(?:ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|(?:Error|Exception)\b"
_BAD, _BAD_BYTES = re.compile(_ERROR), re.compile(_ERROR.encode())
_ODD = re.compile(r"\bWARN(?:ING)?\b|Warning\b|\bwarning:")
SCAN = 1 << 20
"""Bytes that a search through a log holds at once."""


class LogLine(NamedTuple):
    """One line of a rank, without its end; of control sequences it holds colors only."""

    rank: int
    text: str


def clean(line: bytes) -> str:
    """A raw line as text: what a terminal shows after its carriage returns, and colors the only control sequences."""
    visible = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _CONTROL.sub(lambda match: match[1] or "", visible.decode("utf-8", "replace"))


def level(text: str) -> str:
    """error, warning or nothing: what a line says of itself."""
    return "error" if _BAD.search(text) else "warning" if _ODD.search(text) else ""


@dataclass
class _Log:
    """One log file, read up to `offset`; `held` is the unfinished line at its end, `cut` bytes of it thrown away."""

    rank: int
    path: Path
    offset: int = 0
    inode: int = 0
    held: bytes = b""
    cut: int = 0

    def read(self, budget: int) -> list[LogLine]:
        try:
            if (now := os.stat(self.path)).st_size == self.offset and now.st_ino == self.inode:
                return []  # of a thousand ranks, most are silent
            file = open(self.path, "rb")
        except NO_FILE:
            return []
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self.inode or stat.st_size < self.offset:  # another file, or begun anew
                self.offset, self.inode, self.held, self.cut = 0, stat.st_ino, b"", 0
            skip = max(0, stat.st_size - self.offset - budget)
            file.seek(self.offset + skip)
            data = file.read(budget)
        self.offset += skip + len(data)
        lines = []
        if skip:
            rest = data.partition(b"\n")[2]
            lines.append(LogLine(self.rank, f"[... {skip + len(data) - len(rest):,} bytes not shown ...]"))
            data, self.held, self.cut = rest, b"", 0
        *whole, last = data.split(b"\n")
        for part in whole:
            self._hold(part)
            lines.append(self.take())
        self._hold(last)
        return lines

    def take(self) -> LogLine:
        """The line that is held, which ends here."""
        line = self.peek()
        self.held, self.cut = b"", 0
        return line

    def peek(self) -> LogLine:
        """The line that is held, as it looks now."""
        more = f" [... {self.cut:,} bytes not shown]" if self.cut else ""
        return LogLine(self.rank, clean(self.held) + more)

    def _hold(self, part: bytes) -> None:
        line = self.held + part
        start = line.rstrip(b"\r").rfind(b"\r") + 1  # what came before is overwritten on a terminal
        self.cut = (0 if start else self.cut) + max(0, len(line) - start - MAX_LINE)
        self.held = line[start : start + MAX_LINE]


@dataclass
class Tail:
    """Reads the log lines of all ranks of a run, each byte once. `path` need not be a whole run yet."""

    path: PathLike
    backlog: int = 4 << 20
    """Bytes that one look takes in, over all ranks; of more than that, only the newest."""
    _logs: dict[Path, _Log] = field(default_factory=dict)

    def poll(self, *, last: bool = False) -> list[LogLine]:
        """The lines ended since the last call; with `last` (the run is over) also one that was never ended.

        Costs next to nothing when there are none.
        """
        for rank, path in log_paths(self.path):
            self._logs.setdefault(path, _Log(rank, path))
        budget = max(1 << 16, self.backlog // max(1, len(self._logs)))
        lines = [line for log in self._logs.values() for line in log.read(budget)]
        return lines + [log.take() for log in self._logs.values() if last and log.held]

    def unfinished(self) -> list[LogLine]:
        """The lines that are being written, as they look now: progress bars, for one."""
        return [log.peek() for log in self._logs.values() if log.held]


def read_log(path: PathLike, rank: int, *, size: int = 1 << 20) -> str:
    """The newest `size` bytes that a rank has written, cleaned, lines ended by newlines."""
    logs = [_Log(number, file) for number, file in log_paths(path) if number == rank]
    lines = [line for log in logs for line in (*log.read(size), *([log.take()] if log.held else []))]
    return "".join(f"{line.text}\n" for line in lines)


def first_error(path: PathLike, ranks: Iterable[int] = ()) -> list[LogLine]:
    """The first line that tells of an error, with four before it and some KB after; [] if there is none.

    Whole logs are looked through, in bounded memory: those of `ranks` first, then the others in their order.
    """
    first = list(ranks)
    logs = sorted(log_paths(path), key=lambda found: first.index(found[0]) if found[0] in first else len(first))
    for rank, file in logs:
        at = _find(file)
        if at is not None:
            with open(file, "rb") as log:
                start = max(0, at - 4 * MAX_LINE)
                log.seek(start)
                data = log.read(at - start + 16_000)
            earlier = data[: at - start].split(b"\n")
            lines = earlier[-5:-1] + (earlier[-1] + data[at - start :]).split(b"\n")
            return [LogLine(rank, clean(line)[:MAX_LINE]) for line in lines]
    return []


def _find(file: Path) -> int | None:
    """Where the first error is in a file."""
    with open(file, "rb") as log:
        offset, kept = 0, b""
        while data := log.read(SCAN):
            if found := _BAD_BYTES.search(kept + data):
                return offset - len(kept) + found.start()
            offset, kept = offset + len(data), (kept + data)[-100:]
    return None
