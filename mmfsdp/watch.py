"""Follows the logs and metrics of a run as they are written. The terminal and the notebook both use this.

Memory is bounded whatever the ranks write: long lines are cut, and a reader that falls behind skips to the newest.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .runs import PathLike, RunRecord, RunState, log_paths, read_metrics, run_state

MAX_LINE = 4000
"""Bytes of one line that are shown."""

_CONTROL = re.compile(
    r"(\x1b\[[0-9;]{0,32}m)"  # a color: kept
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other control sequences
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # window titles, links and the like, with their text
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class LogLine(NamedTuple):
    """One line of a rank, without its end; of control sequences it holds colors only."""

    rank: int
    text: str
    partial: bool = False
    """The line is not ended yet; what comes next from this rank replaces it."""


@dataclass(frozen=True)
class Update:
    """What is new since the last look."""

    lines: list[LogLine]
    metrics: list[tuple[int, dict[str, Any]]]
    """(rank, row)."""
    more: bool
    """There is more to be read at once."""


def clean(line: bytes) -> str:
    """A raw line as text: what a terminal shows after its carriage returns, and colors the only control sequences."""
    visible = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _CONTROL.sub(lambda match: match[1] or "", visible.decode("utf-8", "replace"))


@dataclass
class _Log:
    """One log file, read up to `offset`; `held` is the unfinished line at its end, `cut` bytes of it thrown away."""

    rank: int
    path: Path
    offset: int = 0
    inode: int = 0
    held: bytes = b""
    cut: int = 0
    shown: str = ""

    def read(self, budget: int) -> list[LogLine]:
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
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
            skip += len(data) - len(rest)
            data, self.held, self.cut = rest, b"", 0
            lines.append(LogLine(self.rank, f"[... {skip:,} bytes not shown ...]"))
        *whole, last = data.split(b"\n")
        for part in whole:
            self._hold(part)
            lines.append(LogLine(self.rank, self._take()))
        self._hold(last)
        return lines

    def partial(self) -> list[LogLine]:
        text = clean(self.held)
        new = bool(text) and text != self.shown
        self.shown = text
        return [LogLine(self.rank, text, partial=True)] if new else []

    def rest(self) -> list[LogLine]:
        return [LogLine(self.rank, self._take())] if self.held else []

    def _hold(self, part: bytes) -> None:
        line = self.held + part
        start = line.rstrip(b"\r").rfind(b"\r") + 1  # what came before is overwritten on a terminal
        self.cut = 0 if start else self.cut
        self.cut += max(0, len(line) - start - MAX_LINE)
        self.held = line[start : start + MAX_LINE]

    def _take(self) -> str:
        text = clean(self.held) + (f" [... {self.cut:,} bytes not shown]" if self.cut else "")
        self.held, self.cut, self.shown = b"", 0, ""
        return text


@dataclass
class Tail:
    """Reads the logs and metrics of all ranks of a run, each byte once. `path` need not be a whole run yet."""

    path: PathLike
    backlog: int = 4 << 20
    """Bytes of log that one look takes in, over all ranks; of more than that, only the newest."""
    _logs: dict[Path, _Log] = field(default_factory=dict)
    _offsets: dict[int, int] = field(default_factory=dict)

    def poll(self) -> Update:
        """What was written since the last call. Costs next to nothing when that is nothing."""
        for rank, path in log_paths(self.path):
            self._logs.setdefault(path, _Log(rank, path))
        budget = max(1 << 16, self.backlog // max(1, len(self._logs)))
        lines = [line for log in self._logs.values() for line in (*log.read(budget), *log.partial())]
        metrics, more = self._metrics()
        return Update(lines, metrics, more)

    def rest(self) -> list[LogLine]:
        """The unfinished last lines, once nothing more will come."""
        return [line for log in self._logs.values() for line in log.rest()]

    def _metrics(self) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
        if not self._offsets and (record := RunRecord.read(Path(self.path))):
            self._offsets = dict.fromkeys(range(record.ranks), 0)
        found: list[tuple[int, dict[str, Any]]] = []
        more, limit = False, 1 << 20
        for rank, offset in self._offsets.items():
            rows, self._offsets[rank] = read_metrics(self.path, rank, offset, limit=limit)
            found += [(rank, row) for row in rows]
            more = more or self._offsets[rank] - offset > limit // 2
        return found, more


@dataclass
class Progress:
    """A line of text that says how far a run is, from the rows of rank 0."""

    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=50))

    def add(self, update: Update) -> None:
        """Take in what is new."""
        self.recent.extend(row for rank, row in update.metrics if rank == 0)

    def seconds_left(self, state: RunState) -> float | None:
        """Until the last step, at the pace of the newest steps; None while unknown."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
        return None if steps <= 0 else max(0, state.steps - last["step"]) * seconds / steps

    def line(self, state: RunState, *, width: int = 24) -> str:
        """Such as `RUNNING   40% [#####.......] 40/100  loss 1.234  56.7 samples/s  0:01:02 left`."""
        share = min(1.0, state.step / state.steps) if state.steps else 0.0
        bar = "#" * int(share * width)
        text = f"{state.status:<9} {share:4.0%} [{bar:.<{width}}] {state.step}/{state.steps}"
        newest = self.recent[-1] if self.recent else {}
        for key, form in (("loss", "loss {:.4g}"), ("samples_per_s", "{:.1f} samples/s")):
            if isinstance(newest.get(key), (int, float)):
                text += "  " + form.format(newest[key])
        left = self.seconds_left(state)
        return text + (f"  {clock(left)} left" if left and not state.done else "")


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `0:01:02`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def follow(path: PathLike, *, tty: bool = False, interval: float = 0.2) -> Iterator[str]:
    """Pieces of text to write to a terminal as a run goes on, ending when it ends: log lines and a progress bar.

    On a `tty` the bar stays below the lines; elsewhere it is a line of its own at each tenth of the way, and colors
    are left out. The last piece is the final state, with the traceback of the rank that failed.
    """
    tail, progress, tenth, drawn = Tail(path), Progress(), -1, ""
    while True:
        state = run_state(path)  # before the look at the files: what a finished run has written is then all there
        update = tail.poll()
        progress.add(update)
        lines = [line for line in update.lines if not line.partial]
        if state.done and not update.more:
            lines += tail.rest()
        text = "".join(_shown(line, tty) for line in lines)
        bar = progress.line(state)
        if tty and (text or bar != drawn):
            text, drawn = f"\r\x1b[K{text}{bar}", bar
        elif not tty and state.steps and 10 * state.step // state.steps != tenth:
            tenth = 10 * state.step // state.steps
            text += bar + "\n"
        if text:
            yield text
        if state.done and not update.more:
            break
        if not update.more:
            time.sleep(interval)
    yield ("\n" if tty else "") + f"{state}\n" + (state.traceback and f"{state.traceback.rstrip()}\n")


def _shown(line: LogLine, tty: bool) -> str:
    text = f"{line.text}\x1b[0m" if "\x1b" in line.text else line.text
    return f"[{line.rank}] {text if tty else _COLOR.sub('', text)}\n"


def read_log(path: PathLike, rank: int, *, size: int = 1 << 20) -> str:
    """The newest `size` bytes that a rank has written, cleaned, lines ended by newlines."""
    logs = [_Log(number, file) for number, file in log_paths(path) if number == rank]
    lines = [line for log in logs for line in (*log.read(size), *log.rest())]
    return "".join(f"{line.text}\n" for line in lines)
