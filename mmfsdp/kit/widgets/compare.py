"""Runs compared from their folders: a table with results and what differs, the best run first, and their charts."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import ipywidgets as w

from ...params import ParamError
from ...params.base import leaves, without_controls
from ...params.in_words import size
from ..run.files.folder import ABOUT_LOSS, final_loss, read_metrics, read_result, write_text
from ..run.files.run_record import RunState
from ..run.state import is_run, run_state
from .cell import CellWidget, PlayHeads, close_all
from .charts.charts import Charts
from .charts.charts_page import charts_html, run_names
from .compare_pair import NAMES_ONLY, pair_html
from .learning import hidden_sliders, learning_of_runs, learning_tag
from .markup import note, page, shown, table_of_cells
from .panel import RunPanel
from .report import read_params
from .static_files import STATIC, play_head_script
from .style import RUN_COLORS

FIGURES = {
    "new pictures right": "{:.1%}".format,
    "never-seen right": "{:.1%}".format,
    "loss": "{:.4g}".format,
    "samples/s": "{:,.4g}".format,
    "MFU": "{:.1%}".format,
    "sent a step": size,
    "peak memory": size,
}
"""Columns of results, and how a number is written."""
MAX_BUTTONS = 24
"""Of more runs, those further down the table are opened after a filter or another order."""
ORDER = "Best first: most new pictures right, then least loss; runs whose loss is not finite stand last."
EQUAL = "Parameters that are equal are left out."


@dataclass(frozen=True)
class ComparedRun:
    """A run with what it is compared by."""

    path: Path
    name: str
    """Tells it from the others; see `run_names`."""
    state: RunState
    params: dict[str, Any]
    """The parameters of the run, by dotted name."""

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """The numbers to judge it by, of FIGURES; None where they are not known."""
        result, rows = read_result(self.path), read_metrics(self.path)
        newest = rows[-1] if rows else {}
        rates = [row["samples_per_s"] for row in rows if math.isfinite(row.get("samples_per_s", math.nan))]
        shares = [row["mfu"] for row in rows if math.isfinite(row.get("mfu", math.nan))]
        return {
            "new pictures right": result.get("heldout_exact_match"),
            "never-seen right": result.get("unseen_combination_exact_match"),
            "loss": final_loss(rows),
            "samples/s": median(rates) if rates else None,
            "MFU": median(shares) if shares else None,
            "sent a step": newest.get("wire_bytes"),
            "peak memory": newest.get("memory_bytes"),
        }

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Return its place among others: the least is the best."""
        right, loss = self.figures["new pictures right"], self.figures["loss"]
        if loss is None or not math.isfinite(loss):
            loss = math.inf
        return self.state.not_finite, -right if right is not None else 1.0, loss


@dataclass(frozen=True)
class Cell:
    """A cell of the table."""

    words: str
    value: float | None = None
    """The number to sort by; None to sort by the words."""


def compared_runs(folders: Sequence[str | Path]) -> list[ComparedRun]:
    """Return runs, the best first. Raises ParamError for a folder that is no run."""
    paths = [Path(os.path.expanduser(folder)) for folder in folders]
    for path in paths:
        if not is_run(path):
            raise ParamError("runs", f"{str(path)!r} is not a run; name folders of runs, such as runs/first")
    runs = []
    for path, name in zip(paths, run_names(paths), strict=True):
        runs.append(ComparedRun(path, name, run_state(path), leaves(read_params(path))))
    return sorted(runs, key=lambda run: run.rank)


def columns_of(runs: Sequence[ComparedRun]) -> dict[str, list[Cell]]:
    """Return the columns of the table by name: state, the results that are known, and the parameters that differ."""
    columns = {"state": [Cell(str(run.state)) for run in runs]}
    for name, write in FIGURES.items():
        if any(run.figures[name] is not None for run in runs):
            columns[name] = [_figure(run.figures[name], write) for run in runs]
    for name in sorted(set().union(*(run.params for run in runs))):
        values = [run.params.get(name) for run in runs]
        if name not in NAMES_ONLY and any(value != values[0] for value in values):
            columns[name] = [_choice(value) for value in values]
    return columns


def _figure(value: float | None, write: Any) -> Cell:
    if value is None:
        return Cell("–")
    return Cell(write(value), value) if math.isfinite(value) else Cell("not finite")


def _choice(value: Any) -> Cell:
    number = float(value) if type(value) in (int, float) and math.isfinite(value) else None
    return Cell(str(value)[:40], number)


def comparison(folders: Sequence[str | Path], *, scripted: bool = False) -> str:
    """Return what differs between runs as an HTML table, a row for each. Raises ParamError for a folder that is no run.

    scripted: with buttons to sort by a column and a filter, for a page of its own.
    """
    runs = compared_runs(folders)
    return table_html(runs, columns_of(runs), range(len(runs)), scripted=scripted)


def table_html(
    runs: Sequence[ComparedRun], columns: dict[str, list[Cell]], order: Sequence[int], *, scripted: bool = False
) -> str:
    """Return the table with the runs of these indices, in this order. A run has the color of its curves.

    Its name has the whole path as a title, and as data-path for tools.
    """
    head = [escape(name) for name in ("run", *columns)]
    if scripted:
        head = [f"<button>{name}</button>" for name in head]
    rows = []
    for index in order:
        sign = f'<span style="color:{RUN_COLORS[index % len(RUN_COLORS)]}" aria-hidden="true">━</span>'
        path = shown(os.path.abspath(runs[index].path))
        cells = f'<td title="{path}" data-path="{path}">{sign} {shown(runs[index].name)}</td>'
        for column in columns.values():
            cell = column[index]
            value = "" if cell.value is None else f' data-value="{cell.value!r}"'
            cells += f"<td{value}>{escape(cell.words)}</td>"
        rows.append(cells)
    look = "mm-table mm-sortable" if scripted else "mm-table"
    html = table_of_cells(head, rows, label="runs compared", look=look)
    if scripted:
        html = f'<label>filter <input type="search" placeholder="words that a row has"></label>{html}'
    return f'<div class="mm-compared">{html}{note(f"{ORDER} {EQUAL} {ABOUT_LOSS}.")}</div>'


def _pair(runs: Sequence[ComparedRun]) -> str:
    """Return two runs side by side, in the order of their launch; empty for more."""
    if len(runs) != 2:
        return ""
    first, second = sorted(runs, key=lambda run: (run.path / "params.yaml").stat().st_mtime)
    return pair_html(first.path, second.path)


class Comparison(CellWidget):
    """Runs side by side in a notebook: a table that sorts and filters, one chart of each metric, panels by a click.

    panel is the RunPanel that a click on a run's name has opened, None before.
    """

    def __init__(self, folders: Sequence[str | Path]):
        """Raise ParamError for a folder that is no run."""
        self.runs = compared_runs(folders)
        self._columns = columns_of(self.runs)
        self.panel: RunPanel | None = None
        choices = [("best first", ""), *((name, name) for name in self._columns)]
        self.sort_by = w.Dropdown(options=choices, description="sort by", layout=w.Layout(width="22em"))
        self.descending = w.Checkbox(description="largest first", indent=False, layout=w.Layout(width="9em"))
        self.filter = w.Text(placeholder="words that a row has", description="filter", layout=w.Layout(width="22em"))
        for control in (self.sort_by, self.descending, self.filter):
            control.observe(lambda _: self._draw(), "value")
        self.table = w.HTML()
        self.pair = w.HTML(_pair(self.runs))
        self.learning = w.HTML(learning_of_runs([(run.name, run.path) for run in self.runs]))
        self.open_buttons = []
        for run in self.runs:
            self.open_buttons.append(w.Button(description=run.name[-40:], tooltip=without_controls(str(run.path))))
        for button, run in zip(self.open_buttons, self.runs, strict=True):
            button.on_click(lambda _, run=run: self._open(run))
        self.charts = Charts([run.path for run in self.runs])
        self.charts.ended = all(run.state.done for run in self.runs)
        self._opening = w.HBox(layout=w.Layout(flex_flow="row wrap"))
        controls = w.HBox([self.sort_by, self.descending, self.filter], layout=w.Layout(flex_flow="row wrap"))
        self._opened = w.VBox()
        parts = [self.pair, controls, self.table, self.learning, self._opening, self._opened, self.charts]
        super().__init__([*parts, hidden_sliders(), PlayHeads()])
        self._draw()
        self.replace_older()

    def _order(self) -> list[int]:
        """Return the indices of the runs that the filter leaves, in the chosen order."""
        words = self.filter.value.lower().split()
        order = []
        for index, run in enumerate(self.runs):
            cells = [column[index].words for column in self._columns.values()]
            text = " ".join((run.name, *cells)).lower()
            if all(word in text for word in words):
                order.append(index)
        column = self._columns.get(self.sort_by.value)
        if column is None:
            return order[::-1] if self.descending.value else order
        known = [index for index in order if column[index].value is not None]
        unknown = [index for index in order if column[index].value is None]
        known.sort(key=lambda index: column[index].value or 0.0, reverse=self.descending.value)
        unknown.sort(key=lambda index: column[index].words, reverse=self.descending.value)
        return known + unknown

    def _draw(self) -> None:
        order = self._order()
        self.table.value = table_html(self.runs, self._columns, order)
        buttons = [self.open_buttons[index] for index in order[:MAX_BUTTONS]]
        self._opening.children = [w.Label("open"), *buttons]

    def _open(self, run: ComparedRun) -> None:
        """Show the panel of a run, in the place of the one before."""
        for panel in self._opened.children:
            close_all(panel)
        self.panel = RunPanel(run.path)
        self._opened.children = [self.panel]


def show_comparison(folders: Sequence[str | Path]) -> Comparison:
    """Return runs side by side: results, parameters that differ, charts. Raises as `comparison`."""
    return Comparison(folders)


def write_comparison(folders: Sequence[str | Path], to: str | Path) -> Path:
    """Write a self-contained page of runs compared, and return its path. Raises as `comparison`."""
    runs = compared_runs(folders)
    table = _pair(runs) + play_head_script() + table_html(runs, columns_of(runs), range(len(runs)), scripted=True)
    script = (STATIC / "tables.js").read_text(encoding="utf-8")
    learning = learning_of_runs([(run.name, run.path) for run in runs])
    if learning:
        learning = f"<h2>Watch it learn</h2>{learning}{learning_tag()}"
    charts = charts_html([run.path for run in runs])
    write_text(to, page("Runs compared", f"{table}<script>{script}</script>{learning}{charts}"))
    return Path(to)
