"""A run in a terminal: its lines, how far it is, and how it ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
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
        self.add(rows)
        text = f"{state.status:<9} {_bar(state.step / max(1, state.steps))}  {state.step}/{state.steps}"
        newest = self.recent[-1] if self.recent else {}
        for key, form in (("loss", "loss {:.4g}"), ("samples_per_s", "{:.1f} samples/s")):
            if isinstance(newest.get(key), (int, float)):
                text += "  " + form.format(newest[key])
        left = self.seconds_left(state)
        return text + (f"  {clock(left)} left" if left and not state.done else "")

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take in rows of metrics.jsonl."""
        self.recent.extend(row for row in rows if {"step", "time"} <= row.keys())

    def seconds_left(self, state: RunState) -> float | None:
        """Until the last step, at the pace of the newest steps; None while unknown."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
        return max(0, state.steps - last["step"]) * seconds / steps if steps > 0 else None


class Bar:
    """A progress bar, `label [######......]  50%`: drawn in its place on a terminal, elsewhere a line at each tenth."""

    def __init__(self, *, tty: bool | None = None) -> None:
        self.tty = _terminal() if tty is None else tty
        self.drawn = ""

    def __call__(self, label: str, share: float) -> None:
        now = f"{label} {_bar(share if self.tty else int(10 * share) / 10)}"
        if now != self.drawn:
            print(f"\r{now}\x1b[K" if self.tty else now, end="" if self.tty else "\n", flush=True)
        self.drawn = now

    def end(self) -> None:
        """Leave the bar's line."""
        if self.tty and self.drawn:
            print()


def _terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _bar(share: float) -> str:
    share = min(1.0, max(0.0, share))
    return f"[{'#' * int(24 * share):.<24}] {share:4.0%}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: `0:01:02`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def follow(path: PathLike, *, tty: bool | None = None) -> Iterator[str]:
    """Texts to print one after the other while a run goes on: log lines and progress. Ends when the run ends.

    On a terminal (`tty`; unset: is stdout one?) a progress bar stays below the lines; elsewhere there is a line at each
    tenth of the way, and colors are left out. The traceback of a failed rank comes last.
    """
    tty = _terminal() if tty is None else tty
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
        time.sleep(0.2)
    if state.traceback:
        yield f"rank {state.rank}:\n{state.traceback.rstrip()}"


def _shown(line: LogLine, tty: bool) -> str:
    text = f"{line.text}\x1b[0m" if "\x1b" in line.text else line.text
    return f"[{line.rank}] {text if tty else COLOR.sub('', text)}"
