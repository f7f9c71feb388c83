"""Follow the logs, metrics and progress of a run while they are written.

Memory is bounded whatever the ranks print: long lines are cut, and a reader that falls behind skips to the newest.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ...params.base import without_controls
from ...params.findings import OF_DATA
from .files.folder import NO_FILE, GrowingFile, PathLike, log_paths, open_regular, read_events
from .files.run_record import RunState, Status, replay_words
from .files.snapshot import Snapshot
from .files.stages import CAPTIONS, STEPS
from .progress import part_of
from .state import run_state
from .trouble import FAILED, is_ending, troubles

MAX_LINE_BYTES = 4000
"""Bytes of one line that are shown."""
MIN_LOG_BYTES = 1 << 16
"""Bytes of each rank's log that one call takes in at least."""

LOOK_INTERVAL_S = 2.0
"""Seconds between two looks at how far all ranks are: of a thousand, each has files."""
MAX_LEFT_S = 1e8
"""Seconds that a run may still take; of more, nothing is said."""
COUNTED_AT_ONCE = 1 << 20
"""Bytes of a log that are held to count its lines."""


class LogLine(NamedTuple):
    """One line of a rank, without its end and without control sequences."""

    rank: int
    text: str


def clean(line: bytes) -> str:
    """Return a raw line as a terminal shows it after its carriage returns, without control sequences."""
    visible = line.rstrip(b"\r").rpartition(b"\r")[2]
    return without_controls(visible.decode("utf-8", "replace"))


class Told(NamedTuple):
    """A line to print of a run that is followed."""

    kind: str
    """log, event, progress, state, part, trouble, traceback or replay."""
    text: str
    rank: int | None = None
    """The rank that printed it, or that it is about; None where it is about the whole run."""

    def __str__(self) -> str:
        before = {"log": f"[{self.rank}] ", "trouble": "trouble: "}
        return before.get(self.kind, "") + self.text


class _RankLog:
    """One log file, split into lines."""

    def __init__(self, rank: int, path: Path):
        self.rank, self.file = rank, GrowingFile(path)
        self.partial = b""
        """The unfinished line at the end of the file."""
        self.left_out = self.gaps = 0
        """Lines that were skipped so far, as the reader fell behind, and how often it did."""

    def read(self, limit: int, *, last: bool) -> list[LogLine]:
        """Return the lines finished since the last call, at most `limit` bytes; with `last` also an unfinished one."""
        start = self.file.offset
        data = self.file.read(limit, newest=True)
        lines = []
        if self.file.restarted or self.file.skipped:
            self.partial = b""
        if self.file.skipped:
            start = 0 if self.file.restarted else start
            # The line that was cut is left out, too.
            skipped_lines = line_ends(self.file.path, start, start + self.file.skipped) + 1
            self.left_out += skipped_lines
            self.gaps += 1
            words = f"[... {skipped_lines:,} lines not shown, {self.file.skipped:,} bytes ...]"
            lines.append(LogLine(self.rank, words))
            data = data.partition(b"\n")[2]
        *finished, unfinished = (self.partial + data).split(b"\n")
        if last and unfinished:
            finished.append(unfinished)
            unfinished = b""
        for line in finished:
            cut = " [... not all shown]" if len(visible(line)) > MAX_LINE_BYTES else ""
            lines.append(LogLine(self.rank, clean(visible(line)[:MAX_LINE_BYTES]) + cut))
        self.partial = visible(unfinished)
        return lines


def visible(line: bytes) -> bytes:
    """Return what a terminal shows of a raw line after its carriage returns, cut behind MAX_LINE_BYTES."""
    start = line.rstrip(b"\r").rfind(b"\r") + 1
    return line[start : start + MAX_LINE_BYTES + 1]


class LogReader:
    """Read the log lines of all ranks of a run, each once. The run may still be about to start.

    limit: bytes that one call takes in, over all ranks; of more than that, only the newest. rank: read only this one's.
    """

    def __init__(self, path: PathLike, *, limit: int = 4 << 20, rank: int | None = None):
        self.path, self.limit, self.rank = path, limit, rank
        self._logs: dict[Path, _RankLog] = {}

    @property
    def left_out(self) -> int:
        """Return how many lines were skipped so far. Where some were, a line in their place says so."""
        return sum(log.left_out for log in self._logs.values())

    @property
    def gaps(self) -> int:
        """Return how many lines so far say that others were skipped."""
        return sum(log.gaps for log in self._logs.values())

    def poll(self, *, last: bool = False) -> list[LogLine]:
        """Return the lines finished since the last call; with `last` (the run is over) also an unfinished one."""
        for rank, path in log_paths(self.path):
            if path not in self._logs and self.rank in (None, rank):
                self._logs[path] = _RankLog(rank, path)
        limit = max(MIN_LOG_BYTES, self.limit // max(1, len(self._logs)))
        lines = []
        for log in self._logs.values():
            lines += log.read(limit, last=last)
        return lines


def line_ends(path: Path, start: int, end: int) -> int:
    """Return the number of line ends between two offsets of a file, read in parts; 0 if it is gone."""
    count = 0
    try:
        with open_regular(path) as file:
            file.seek(start)
            while start < end and (part := file.read(min(COUNTED_AT_ONCE, end - start))):
                count += part.count(b"\n")
                start += len(part)
    except NO_FILE:
        return 0
    return count


def read_log(path: PathLike, rank: int, *, size: int = 1 << 20) -> str:
    """Return the newest `size` bytes of a rank's logs, cleaned, every line ended by a newline."""
    lines = LogReader(path, limit=size, rank=rank).poll(last=True)
    return "".join(f"{line.text}\n" for line in lines)


class Progress:
    """The progress of a run, from the metrics of rank 0.

    recent: the newest 50 rows.
    """

    def __init__(self, path: PathLike):
        self.recent: deque[dict[str, Any]] = deque(maxlen=50)
        self.path = path

    def line(self, state: RunState, look: Snapshot | None = None) -> str:
        """Return a line such as `RUNNING   [####......]  40%  40/100  loss 1.234  56.7 samples/s  0:01:02 left`.

        look: of which the state is; default a new one.
        """
        self.add((look or Snapshot(self.path)).rows())
        text = f"{state.status:<9} {bar(state.step / max(1, state.steps))}  {state.step}/{state.steps}"
        newest = self.recent[-1] if self.recent else {}
        for key, form in (("loss", "loss {:.4g}"), ("samples_per_s", "{:.1f} samples/s")):
            if isinstance(newest.get(key), (int, float)):
                text += "  " + form.format(newest[key])
        left_s = self.seconds_left(state)
        if left_s and not is_ending(state, []):
            text += f"  {clock(left_s)} left"
        return text

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows of metrics; those that are older than the newest one are left out."""
        for row in rows:
            if "step" in row and math.isfinite(row.get("time", math.nan)):
                if not self.recent or row["time"] > self.recent[-1]["time"]:
                    self.recent.append(row)

    def seconds_left(self, state: RunState) -> float | None:
        """Return the seconds until the last step, at the pace of the newest steps; None while unknown."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        steps, seconds = last["step"] - first["step"], last["time"] - first["time"]
        if steps <= 0:
            return None
        left_s = max(0, state.steps - last["step"]) * seconds / steps
        return left_s if left_s < MAX_LEFT_S else None


def bar(share: float) -> str:
    """Return a bar of ten characters and the percentage, such as `[#####.....]  50%`."""
    share = min(1.0, max(0.0, share))
    return f"[{'#' * int(10 * share):.<10}] {share:4.0%}"


class ProgressBar:
    """Show the share of some work that is done: a bar that is redrawn on a terminal, else a line for each tenth."""

    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    def __call__(self, label: str, share: float) -> None:
        """Show that this share of the work with this label is done."""
        if sys.stdout.isatty():
            print(f"\r{label} {bar(share)}", end="\n" if share == 1 else "", flush=True)
        elif self._shown != (label, int(10 * share)):
            print(f"{label} {bar(share)}", flush=True)
            self._shown = label, int(10 * share)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds, such as `0:01:02`."""
    return str(timedelta(seconds=round(seconds)))


def _trouble_lines(look: Snapshot, state: RunState) -> Iterator[tuple[str, Told]]:
    """Yield what is wrong before the end of a run as (code, line)."""
    for trouble in troubles(look, state):
        # A failure is told at the end, which is near; what is to be known of the data stands in rank 0's log.
        if trouble.code != FAILED and trouble.code not in OF_DATA:
            yield trouble.code, Told("trouble", str(trouble))


def _part_lines(look: Snapshot, state: RunState) -> Iterator[tuple[str, Told]]:
    """Yield the part that a run is in before its first step as (a name, line); of pretraining, one for each tenth."""
    progress = part_of(look, state)
    if progress is None or progress.part in (STEPS, CAPTIONS):
        return
    if progress.share is None:
        yield progress.part, Told("part", f"{state.status}: {progress.part}")
        return
    left = f", {clock(progress.left_s)} left" if progress.left_s is not None else ""
    name = f"{progress.words} {int(10 * progress.share)}"
    yield name, Told("part", f"{state.status}: {progress.words} {bar(progress.share)}{left}")


def follow(path: PathLike) -> Iterator[Told]:
    """Yield lines to print while a run goes on: its logs, its events except saves, one at each tenth of the
    steps, and why it waits in a queue.

    Ends when the run ends, with the traceback of a failed rank and what is wrong, each trouble once.
    """
    reader, progress, last_tenth, events_read, queued = LogReader(path), Progress(path), -1, 0, ""
    told, look_due = set[str](), 0.0
    while True:
        look = Snapshot(path)
        state = run_state(look)  # before the logs are read: the logs of a finished run are complete
        if state.replay_of and "replay" not in told:
            yield Told("replay", replay_words(state.replay_of))
            told.add("replay")
        events = read_events(path)
        for event in events[events_read:]:
            if event["kind"] not in ("saved", "failed"):  # a failure is told at the end
                yield Told("event", f"{event['kind']} at step {event['step']}: {event['text']}")
        events_read = len(events)
        for line in reader.poll(last=state.done):
            yield Told("log", line.text, line.rank)
        tenth = 10 * state.step // max(1, state.steps)
        if tenth != last_tenth:
            yield Told("progress", progress.line(state, look))
            last_tenth = tenth
        if state.status is Status.QUEUED and state.reason != queued:
            queued = state.reason
            yield Told("state", f"{state.status}: {queued}")  # such as a job that Slurm will never start
        if not state.done and time.monotonic() > look_due:
            # The numbers in the words of a trouble may change from step to step: before the end, each kind comes once.
            for code, told_line in (*_trouble_lines(look, state), *_part_lines(look, state)):
                if code not in told:
                    yield told_line
                    told.add(code)
            look_due = time.monotonic() + LOOK_INTERVAL_S
        if state.done:
            break
        time.sleep(0.2)
    if state.traceback:
        yield Told("traceback", f"rank {state.rank}:\n{state.traceback.rstrip()}", state.rank)
    for trouble in troubles(look, state):
        yield Told("trouble", str(trouble), trouble.rank)
