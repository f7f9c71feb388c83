"""A run in a terminal: its lines, how far it is, and how it ended."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..runs import PathLike, RunState, read_metrics, run_state
from .tail import COLOR, LogLine, Tail


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
    return f"[{line.rank}] {text if tty else COLOR.sub('', text)}"
