"""The metrics of a run as columns, read on from where the last reading stopped, and thinned to what a page can show."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...run.files.breaks import breaks_of
from ...run.files.folder import METRIC_TYPES, GrowingFile, metrics_path, of_types, parse_rows, read_events
from .chart_table import MAX_NAME, MAX_SCORES, SCORE, is_drawn

READ_BYTES = 8 << 20
"""Bytes that one reading takes in at most, so that it ends soon; the next one goes on."""
MAX_COLUMNS = 80
MAX_BREAKS = 5
"""The newest breaks of a run, that are drawn."""
MISSING, NOT_FINITE = math.nan, math.inf
"""Values of a column for a row without this metric, and for a value that is not finite."""

Table = dict[str, Any]
"""Points of a run as JSON has them; see `Columns.table`."""


class Columns:
    """The metrics of a run that are drawn, a column each.

    Rows whose step does not follow the one before are left out: nothing could be drawn over such an axis.
    """

    def __init__(self, folder: str | Path):
        self._folder, self._file = folder, GrowingFile(metrics_path(folder))
        self.epoch = 0
        """Grows when the file was written anew, as by a run that resumes at an earlier step."""
        self._clear()

    def _clear(self) -> None:
        self._unfinished = b""
        self.steps, self.times = array("d"), array("d")
        self.columns: dict[str, array[float]] = {}
        self._has_holes: set[str] = set()  # columns that hold more than finite numbers

    @property
    def rows(self) -> int:
        """Rows so far."""
        return len(self.steps)

    def read(self, *, all_of_it: bool = False) -> bool:
        """Take in what is new. Return False if there is more to read. Raises OSError."""
        while True:
            data = self._file.read(READ_BYTES)
            if self._file.restarted:
                self.epoch += 1
                self._clear()
            finished, newline, unfinished = (self._unfinished + data).rpartition(b"\n")
            self._unfinished = unfinished[-READ_BYTES:]
            for row in parse_rows(finished):
                self._add(of_types(row, METRIC_TYPES))
            if len(data) < READ_BYTES:
                return True
            if not all_of_it:
                return False

    def _add(self, row: Mapping[str, Any]) -> None:
        step, time = row.get("step", MISSING), row.get("time", MISSING)
        if not _is_finite(step) or (self.steps and step <= self.steps[-1]):
            return
        if not _is_finite(time):
            time = self.times[-1] if self.times else 0.0
        values = {key: value for key, value in row.items() if is_drawn(key) and type(value) in (int, float)}
        for name, value in list(row.get("scores", {}).items())[:MAX_SCORES]:
            if type(value) in (int, float):
                values[f"{SCORE}{name[:MAX_NAME]}"] = value
        for key in values.keys() - self.columns.keys():
            if len(self.columns) < MAX_COLUMNS:
                self.columns[key] = array("d", [MISSING]) * self.rows
        for key, column in self.columns.items():
            value = values.get(key, MISSING)
            if key in values and not _is_finite(value):
                value = NOT_FINITE
            column.append(value)
            if not math.isfinite(column[-1]) or column[0] != column[0]:
                self._has_holes.add(key)
        self.steps.append(step)
        self.times.append(max(time, self.times[-1]) if self.times else time)

    def breaks(self) -> list[dict[str, Any]]:
        """Return where the run stopped and from which step it went on, as JSON has it: stopped, resumed, words."""
        found = breaks_of(read_events(self._folder), first_row=self.times[0] if self.times else 0.0)
        return [{"stopped": b.stopped, "resumed": b.resumed, "words": b.words} for b in found[-MAX_BREAKS:]]

    def newest(self, key: str) -> float | None:
        """Return the newest value of a metric; None where there is none."""
        for value in reversed(self.columns.get(key, ())):
            if not math.isnan(value):
                return value
        return None

    def table(
        self,
        pixels: int,
        *,
        x: str = "step",
        low: float | None = None,
        high: float | None = None,
        have: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return points of all columns for a chart of so many pixels: per pixel the least and the largest value.

        A point stands for `bucket` rows, a power of two; above one, each bucket has two points. low and high: the part
        of the x axis (step, or time in seconds from the first row) that is shown. have: the page's newest table; if
        nothing but newer rows differs, only points from the index `at` on are in the answer.

        Lists hold numbers, None for a row without the metric, and "nan" for a value that is not finite.
        """
        first, end = self._rows_between(x, low, high)
        bucket = 1
        while (end - first) > bucket * max(1, pixels):
            bucket *= 2
        first = first // bucket * bucket
        at_row = first
        if have and [have.get(name) for name in ("epoch", "bucket", "first")] == [self.epoch, bucket, first]:
            known = min(int(have.get("end", 0)), end)
            at_row = max(first, known // bucket * bucket)
        points = 2 if bucket > 1 else 1
        table: Table = {"epoch": self.epoch, "bucket": bucket, "first": first, "end": end, "rows": self.rows}
        table |= {"at": (at_row - first) // bucket * points, "step": [], "time": []}
        start_time = self.times[0] if self.times else 0.0
        for start in range(at_row, end, bucket):
            last = min(start + bucket, end) - 1
            for row in (start, last)[:points]:
                table["step"].append(int(self.steps[row]))
                table["time"].append(round(self.times[row] - start_time, 3))
        table["values"] = {key: self._thinned(key, at_row, end, bucket) for key in self.columns}
        return table

    def _rows_between(self, x: str, low: float | None, high: float | None) -> tuple[int, int]:
        """Return the rows that are shown, and one more at each side, so that lines reach the edges."""
        axis, offset = (self.times, self.times[0]) if x == "time" and self.times else (self.steps, 0.0)
        first = 0 if low is None else max(0, bisect_left(axis, low + offset) - 1)
        end = self.rows if high is None else min(self.rows, bisect_right(axis, high + offset) + 1)
        return first, max(first, end)

    def _thinned(self, key: str, first: int, end: int, bucket: int) -> list[Any]:
        """Return the points of a column: of each bucket the least and the largest value, in their order."""
        column = self.columns[key]
        if bucket == 1:
            return [_as_json(value) for value in column[first:end]]
        points: list[Any] = []
        holes = key in self._has_holes
        for start in range(first, end, bucket):
            values: Any = column[start : min(start + bucket, end)]
            if holes:
                known = [value for value in values if not math.isnan(value)]
                values = [value for value in known if not math.isinf(value)]
                if len(values) < len(known):  # one bad value of thousands must be visible
                    points += [_as_json(max(values, default=NOT_FINITE)), "nan"]
                    continue
                if not values:
                    points += [None, None]
                    continue
            low, high = min(values), max(values)
            in_order = values.index(low) <= values.index(high)
            points += [_as_json(value) for value in ((low, high) if in_order else (high, low))]
        return points


def _is_finite(number: Any) -> bool:
    """Return True for a number that can be drawn."""
    return type(number) in (int, float) and abs(number) < 1e300  # math.isfinite raises on a huge int


def _as_json(value: float) -> Any:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "nan"
    return float(f"{value:.7g}")  # more digits cannot be seen, and twice as many characters would be sent
