"""RunForm: a run's parameters as a form made from their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets as w
import traitlets

from ..params import ParamError, RunParams, load, preset_names
from .cell import CellWidget
from .fields import FieldRow, field_names
from .markup import note

MAIN = (
    "launch.name",
    "launch.ranks",
    "launch.executor",
    "train.steps",
    "train.batch_size",
    "train.lr",
    "model.num_latents",
    "fsdp.backend",
    "fsdp.sharding_strategy",
    "fsdp.frozen_policy",
    "fsdp.memory_budget_gib",
    "fsdp.auto_wrap_policy",
    "fsdp.mixed_precision",
)
"""Dotted names of the fields in sight; the others are folded."""
TITLES = {"launch": "Run", "train": "Training", "model": "Model", "data": "Data", "fsdp": "Sharding"}
FROM_HERE = "form.params.to_yaml('mine.yaml') writes these choices; mmfsdp run --config mine.yaml runs them."


class RunForm(CellWidget):
    """All choices of a run.

    params is the last valid choice, a RunParams; error is the mistake in the present one, or None. Both are traits:
    `form.observe(callback, "params")`.
    """

    params = traitlets.Instance(RunParams)
    error = traitlets.Instance(ParamError, allow_none=True)
    successor: Any = traitlets.Any()
    """The form that takes this one's place when its cell runs again."""

    def __init__(self, preset: str = "tiny", **changes: Any):
        """preset: a preset's name, a YAML file or the folder of a run. changes: other values, by dotted name."""
        params_file = Path(preset).expanduser() / "params.yaml"  # of a run's folder
        config = str(params_file) if params_file.is_file() else preset
        self._changes = changes
        params = load(config).change(**changes)
        self.rows: dict[str, FieldRow] = {}
        self._folded: list[list[str]] = []  # names of the fields of each pane
        sheet = self._make_sheet(params)
        names = list(dict.fromkeys([*preset_names(), config]))
        wide = w.Layout(width="27em")
        preset_input = w.Dropdown(options=names, value=config, description="preset", layout=wide)
        preset_input.style.description_width = "12.5em"
        preset_input.observe(lambda change: self._choose_preset(change.new), "value")
        self._note = w.HTML()
        super().__init__([preset_input, self._note, sheet, w.HTML(note(FROM_HERE))], params=params)
        self.add_class("mm-form")
        self.replace_older()

    def reveal(self, name: str) -> FieldRow:
        """Unfold a field, and return its row. Raises KeyError for an unknown name."""
        for index, names in enumerate(self._folded):
            if name in names:
                self._panes.selected_index = index
        return self.rows[name]

    def show(self, params: RunParams) -> None:
        """Fill the form with these parameters."""
        for row in self.rows.values():
            row.show(params)
        self.error, self.params = None, params
        self._note.value = ""

    def flag(self, error: ParamError | None) -> None:
        """Show a mistake that only the plan of the present choices found, next to its field. None clears it."""
        if not self.error:
            self._mark(error)

    # Widgets

    def _make_sheet(self, params: RunParams) -> w.VBox:
        """Return the fields in sight, and those that are folded: their rows are made when a pane is first opened."""
        children: list[w.Widget] = []
        titles = []
        for section, title in TITLES.items():
            names = [name for name in MAIN if name.startswith(f"{section}.")]
            if names:
                about = RunParams.model_fields[section].description
                children.append(w.HTML(f'<h4 class="mm-title">{title} <span class="mm-quiet">{about}</span></h4>'))
            for name in names:
                self.rows[name] = FieldRow(name, params, changed=self._edited)
                children.append(self.rows[name])
            folded = [name for name in field_names() if name.startswith(f"{section}.") and name not in MAIN]
            self._folded.append(folded)
            titles.append(f"More: {title.lower()} ({len(folded)})")
        self._panes = w.Accordion([w.VBox() for _ in titles], titles=titles, selected_index=None)
        self._panes.observe(lambda change: self._open_pane(change.new), "selected_index")
        return w.VBox([*children, self._panes])

    def _open_pane(self, index: int | None) -> None:
        """Make the rows of a pane that was never open before."""
        if index is None or self._panes.children[index].children:
            return
        for name in self._folded[index]:
            self.rows[name] = FieldRow(name, self.params, changed=self._edited)
        self._panes.children[index].children = [self.rows[name] for name in self._folded[index]]

    # Edits

    def _choose_preset(self, name: str) -> None:
        """Fill the form from a preset, or again from the file that it was made from."""
        try:
            self.show(load(name).change(**self._changes))
        except (OSError, ValueError) as error:
            self._note.value = note(error, "error", role="alert")

    def _edited(self) -> None:
        """Take the rows as they stand: valid parameters, or the error next to its field."""
        try:
            self.show(self.params.change(**{name: row.value for name, row in self.rows.items()}))
        except ParamError as error:
            self.error = error
            self._mark(error)

    def _mark(self, error: ParamError | None) -> None:
        """Show a mistake next to its field, which is unfolded, or on top if it belongs to no field."""
        field = ""
        if error:  # of a plan: without the section
            field = next((name for name in field_names() if f".{name}".endswith(f".{error.field}")), "")
        if field:
            self.reveal(field)
        for name, row in self.rows.items():
            row.mark(error.message if error and name == field else "")
        self._note.value = note(error, "error", role="alert") if error and not field else ""
