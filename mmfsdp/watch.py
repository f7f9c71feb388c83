"""Follows the logs and metrics of a run as they are written. The terminal and the notebook both use this.

Memory is bounded whatever the ranks write: long lines are cut, and a reader that falls behind skips to the newest.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .runs import PathLike, RunState, log_paths, read_metrics, run_state

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


@dataclass
class Progress:
    """A line of text that says how far a run is, from the metrics of rank 0."""

    path: PathLike
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=50))
    """The newest rows."""
    _offset: int = -20_000

    def line(self, state: RunState) -> str:
        """Such as `RUNNING   [##########..............]  40%  40/100  loss 1.234  56.7 samples/s  0:01:02 left`."""
        rows, self._offset = read_metrics(self.path, offset=self._offset)
        self.recent.extend(row for row in rows if {"step", "time"} <= row.keys())
        text = f"{state.status:<9} {_bar(state.step / max(1, state.steps))}  {state.step}/{state.steps}"
        newest = self.recent[-1] if self.recent else {}
        for key, form in (("loss", "loss {:.4g}"), ("samples_per_s", "{:.1f} samples/s")):
            if isinstance(newest.get(key), (int, float)):
                text += "  " + form.format(newest[key])
        left = self.seconds_left(state)
        return text + (f"  {clock(left)} left" if left and not state.done else "")

    def seconds_left(self, state: RunState) -> float | None:
        """Until the last step, at the pace of the newest steps; None while unknown."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
        return max(0, state.steps - last["step"]) * seconds / steps if steps > 0 else None


def bar(label: str, share: float) -> str:
    """A progress bar that overwrites the terminal line it is printed on: `label [######......]  50%`."""
    return f"\r{label} {_bar(share)}\x1b[K"


def _bar(share: float, *, width: int = 24) -> str:
    share = min(1.0, max(0.0, share))
    return f"[{'#' * int(share * width):.<{width}}] {share:4.0%}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `0:01:02`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def follow(path: PathLike, *, tty: bool | None = None, interval: float = 0.2) -> Iterator[str]:
    """Texts to print one after the other while a run goes on: log lines and progress. Ends when the run ends.

    On a terminal (`tty`; unset: is stdout one?) a progress bar stays below the lines; elsewhere there is a line at each
    tenth of the way, and colors are left out. The traceback of a failed rank comes last.
    """
    tty = sys.stdout.isatty() if tty is None else tty
    tail, progress, drawn, tenth = Tail(path), Progress(path), "", -1
    while True:
        state = run_state(path)  # before the look at the files: what a finished run has written is then all there
        texts = [_shown(line, tty) for line in tail.poll(last=state.done)]
        now = progress.line(state)
        if tty and (texts or now != drawn):
            up = "\x1b[A\r\x1b[K" if drawn else ""
            drawn = now
            yield up + "\n".join([*texts, now[: shutil.get_terminal_size().columns - 1]])
        elif not tty:
            yield from texts
            if tenth != (tenth := 10 * state.step // max(1, state.steps)):
                yield now
        if state.done:
            break
        time.sleep(interval)
    if state.traceback:
        yield f"rank {state.rank}:\n{state.traceback.rstrip()}"


def _shown(line: LogLine, tty: bool) -> str:
    text = f"{line.text}\x1b[0m" if "\x1b" in line.text else line.text
    return f"[{line.rank}] {text if tty else _COLOR.sub('', text)}"


def read_log(path: PathLike, rank: int, *, size: int = 1 << 20) -> str:
    """The newest `size` bytes that a rank has written, cleaned, lines ended by newlines."""
    logs = [_Log(number, file) for number, file in log_paths(path) if number == rank]
    lines = [line for log in logs for line in (*log.read(size), *([log.take()] if log.held else []))]
    return "".join(f"{line.text}\n" for line in lines)
