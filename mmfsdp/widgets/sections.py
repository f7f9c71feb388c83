"""The rows of a form: the main fields in sight, all others folded by section and made when they are first opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w

from ..params import ParamError, RunParams
from ..params.docs import field_docs
from .fields import Field, Row, at, names
from .refusals import closed, refused, span

TITLES = {"launch": "Run", "train": "Training", "model": "Model", "data": "Data", "fsdp": "Sharding"}


class Sections(w.VBox):
    """rows holds those made so far, by dotted name."""

    def __init__(self, params: RunParams, main: Sequence[str], *, changed: Callable[[str], None]):
        self.rows: dict[str, Row] = {}
        self._changed, self._params = changed, params
        shown = []
        for section, title in TITLES.items():
            mine = [name for name in main if name.startswith(f"{section}.")]
            if mine:
                about = field_docs(RunParams)[section]
                shown.append(w.HTML(f'<h4 class="mm-title">{title} <span class="mm-quiet">{about}</span></h4>'))
                shown += [self._row(name) for name in mine]
        rest = [name for name in names() if name not in main]
        self._folded = {s: [name for name in rest if name.startswith(f"{s}.")] for s in TITLES}
        titles = [f"More: {TITLES[s].lower()} ({len(found)})" for s, found in self._folded.items()]
        self._panes = w.Accordion([w.VBox() for _ in self._folded], titles=titles, selected_index=None)
        self._panes.observe(lambda change: self._unfold(change.new), "selected_index")
        super().__init__([*shown, self._panes])

    def edits(self, params: RunParams) -> dict[str, Any]:
        """Dotted name -> value of the rows that say something else than these parameters. Raises ParamError."""
        typed = {name: row.value for name, row in self.rows.items()}
        return {name: value for name, value in typed.items() if value != at(params, name)}

    def fill(self, params: RunParams) -> None:
        """Show these parameters."""
        for name, row in self.rows.items():
            row.value = at(params, name)

    def say(self, params: RunParams, error: ParamError | None) -> bool:
        """Show help, reasons and the error, each beside its field; True if the error's field has a row."""
        self._params = params
        here = error is not None and self.reveal(error.field)
        for name in self._in_sight():
            self._say(self.rows[name], error.message if error and name == error.field else None)
        return here

    def _in_sight(self) -> list[str]:
        folded = [name for found in self._folded.values() for name in found]
        place = self._panes.selected_index
        unfolded = [] if place is None else list(self._folded.values())[place]
        return [name for name in self.rows if name in unfolded or name not in folded]

    def reveal(self, name: str) -> bool:
        """Bring a field into sight; False where there is none of this name."""
        for place, found in enumerate(self._folded.values()):
            if name in found:
                self._panes.selected_index = place
        return name in self.rows

    def _say(self, row: Row, error: str | None = None) -> None:
        why = closed(self._params, row.field)
        off = {} if why else refused(self._params, row.field)
        row.say(error, closed=why, refused=off, span="" if why or error else span(self._params, row.field))

    def _unfold(self, place: int | None) -> None:
        """Make the rows of a pane when it is first opened; say what is to be said when it is opened again."""
        if place is None:
            return
        pane, found = self._panes.children[place], list(self._folded.values())[place]
        if not pane.children:
            pane.children = [self._row(name) for name in found]
        for name in found:
            self._say(self.rows[name])

    def _row(self, name: str) -> Row:
        self.rows[name] = Row(Field.named(name), at(self._params, name), changed=self._changed)
        return self.rows[name]
