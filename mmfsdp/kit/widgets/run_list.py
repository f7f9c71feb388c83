"""RunList: the runs of a folder, to open one, to compare several, and to delete them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as w

from ...params import RunParams
from ..run.files.folder import LOSS_TITLE
from ..run.handle import Run
from ..run.state import find_runs, list_runs, text_table
from .cell import close_all
from .compare import Comparison
from .markup import note
from .report import read_params
from .worker import Worker

MAX_LISTED = 200
"""Most runs that are listed; of more, the newest."""
MAX_ROWS = 8
"""Rows in sight; the others are scrolled to."""
HINT = "Ctrl or Shift and a click choose several; two are compared with both pictures."
OPEN, COMPARE, DELETE, CONFIRM = "Open", "Compare", "Delete", "Delete for good"


class RunList(Worker, w.VBox):
    """A list of runs, the newest on top, with what can be done with those that are chosen in it."""

    def __init__(self, *, folder: Callable[[], Path], show: Callable[[Run], None], deleted: Callable[[Path], None]):
        """folder: returns the folder of the runs. show: called to open a run. deleted: called with what is gone."""
        self._folder, self._show, self._deleted = folder, show, deleted
        self.head, self._said = w.HTML(), w.HTML()
        self.error_line = self._said
        self.runs = w.SelectMultiple(rows=MAX_ROWS, layout=w.Layout(width="100%"))
        self.runs.observe(lambda _: self._chosen(), "value")
        self.buttons: dict[str, w.Button] = {}
        for name, icon in ((OPEN, "folder-open"), (COMPARE, "columns"), (DELETE, "trash"), (CONFIRM, "")):
            button = w.Button(description=name, icon=icon)
            button.on_click(lambda _, name=name: self.press(name))
            self.buttons[name] = button
        self.buttons[CONFIRM].button_style = "danger"
        self._below = w.VBox()
        super().__init__([self.head, self.runs, w.HBox(list(self.buttons.values())), self._said, self._below])
        self.add_class("mm-run-list")
        self._chosen()

    def refresh(self) -> None:
        """Read the folder in a thread, and show what is there."""
        folder = self._folder()
        self.head.value = note(f"looking for runs in {folder}…", role="status")
        self.work("list", lambda: _listed(folder), show=lambda found: self._show_list(folder, *found))

    def press(self, name: str) -> None:
        """Do what a button says with the runs that are chosen."""
        paths = [Path(path) for path in self.runs.value]
        if name == OPEN:
            self._show(Run.open(paths[0]))
        elif name == COMPARE:
            self._put_below(Comparison(paths))
        elif name == DELETE:
            names = ", ".join(path.name for path in paths)
            self._said.value = note(f"Delete {names} with checkpoints, logs and figures?", "warning", role="alert")
            self.buttons[CONFIRM].layout.visibility = "visible"
        elif not self.is_under_way("delete"):  # the list may be being read meanwhile
            self.work("delete", lambda: _delete(paths), show=self._show_deleted)

    def close(self) -> None:
        """Remove it; runs stay."""
        self.end_work()
        super().close()

    def _chosen(self) -> None:
        """Enable what can be done with so many runs, and ask again before they are deleted."""
        number = len(self.runs.value)
        self.buttons[OPEN].disabled = number != 1
        self.buttons[COMPARE].disabled = number < 2
        self.buttons[DELETE].disabled = number < 1
        self.buttons[CONFIRM].layout.visibility = "hidden"
        self._said.value = ""

    def _show_list(self, folder: Path, head: str, rows: list[tuple[str, str]], number: int) -> None:
        words = f"{number:,} runs in {folder}. {HINT}" if number else f"no runs in {folder}"
        if number > len(rows):
            words = f"the newest {len(rows)} of {words}"
        self.head.value = note(words, role="status") + (f'<pre class="mm-log">{head}</pre>' if number else "")
        chosen = [path for path in self.runs.value if path in [value for _, value in rows]]
        self.runs.options, self.runs.rows = rows, max(2, min(MAX_ROWS, len(rows)))
        self.runs.value = chosen

    def _show_deleted(self, paths: list[Path]) -> None:
        for path in paths:
            self._deleted(path)
        self._put_below()
        self.refresh()

    def _put_below(self, *widgets: w.Widget) -> None:
        for older in self._below.children:
            close_all(older)
        self._below.children = widgets


def _listed(folder: Path) -> tuple[str, list[tuple[str, str]], int]:
    """Return the head of the list, a line with its path for each run, the newest first, and how many runs there are."""
    paths = find_runs(folder)
    newest = sorted(paths, key=lambda name: paths[name].stat().st_mtime, reverse=True)[:MAX_LISTED]
    runs = list_runs({name: paths[name] for name in newest})[::-1]
    lines: list[tuple[str, ...]] = [("name", "state", "step", LOSS_TITLE, "age", "where", "policy")]
    lines += [(*run.cells(), policy_of(Path(run.path))) for run in runs]
    head, *rows = text_table(lines).splitlines()
    return head, list(zip(rows, [run.path for run in runs], strict=True)), len(paths)


def policy_of(path: Path) -> str:
    """Return how a run shards in two words: FSDP2 KEEP, or DDP; empty where its parameters cannot be read."""
    values: dict[str, Any] = read_params(path)
    try:
        fsdp = RunParams.from_dict(values).fsdp
    except ValueError:
        return ""
    backend = str(fsdp.effective_backend)
    return backend if fsdp.why_idle("frozen_policy") else f"{backend} {fsdp.frozen_policy}"


def _delete(paths: list[Path]) -> list[Path]:
    for path in paths:
        Run.open(path).delete()
    return paths
