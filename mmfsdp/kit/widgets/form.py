"""RunForm: a run's parameters as a form made from their models."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import ipywidgets as w
import traitlets

from ...params import DataSource, ParamError, RunParams, load, preset_names
from ...params.base import leaves
from ...params.own import OwnCode, names_own_code, own_fields, path_of
from ..run.trust import is_trusted
from .cell import CellWidget, close_all
from .fields import FieldRow, default_of, field_names, field_of
from .markup import note
from .own_row import OwnRow

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


WARMUP = "train.warmup_steps"

RUN_BY_PLANS = ("model.build", "train.optimizer")
"""Fields whose own code a plan calls; of others only a launch."""
_allowed: set[str] = set()
"""Fields and values of own code that may run in this kernel."""


class RunForm(CellWidget):
    """All choices of a run.

    params is the last valid choice, a RunParams; error is the mistake in the present one, or None. Both are traits:
    `form.observe(callback, "params")`.
    """

    params = traitlets.Instance(RunParams)
    error = traitlets.Instance(ParamError, allow_none=True)
    allowed = traitlets.Int(0)
    """Grows when the person lets more own code run."""
    successor: Any = traitlets.Any()
    """The form that takes this one's place when its cell runs again."""

    def __init__(self, preset: str = "tiny", *, folded: bool = False, **changes: Any):
        """preset: a preset's name, a YAML file or the folder of a run. changes: other values, by dotted name.

        folded: the form is not in sight, and most of its inputs are made when it is: see `unfold`.
        """
        params_file = Path(preset).expanduser() / "params.yaml"  # of a run's folder
        config = str(params_file) if params_file.is_file() else preset
        self._changes = changes
        self.aside: dict[str, Any] = {}  # choices that have no effect now, by name
        self._held: ParamError | None = None
        params = self._begin_with(config)
        self.rows: dict[str, FieldRow] = {}
        self._folded: list[list[str]] = []  # names of the fields of each pane
        self._make_panes()
        names = list(dict.fromkeys([*preset_names(), config]))
        wide = w.Layout(width="27em")
        preset_input = w.Dropdown(options=names, value=config, description="preset", layout=wide)
        preset_input.style.description_width = "12.5em"
        preset_input.observe(lambda change: self.choose_preset(change.new), "value")
        self.preset = preset_input
        self._note = w.HTML()
        self.search = w.Text(placeholder="search all parameters", tooltip="Show the parameters with this text")
        self.search.observe(lambda change: self._find(change.new), "value")
        self.found = w.VBox(layout=w.Layout(display="none"))
        self._in_sight = w.VBox()
        self.sheet = w.VBox([self._in_sight, self._panes, w.HTML(note(FROM_HERE))])
        parts = [w.HBox([preset_input, self.search]), self._note, self.found, self.sheet]
        super().__init__(parts, params=params)
        if not folded:
            self.unfold()
        self._allow_new(load(config), params)
        if params_file.is_file() and is_trusted(params_file.parent):
            self.allow(params)
        self.add_class("mm-form")
        self.replace_older()

    def close(self) -> None:
        """Remove it, with the rows that are not in sight."""
        rows = getattr(self, "rows", {})  # a form of a wrong preset has none
        for row in rows.values():
            close_all(row)
        super().close()

    def unfold(self) -> None:
        """Make the fields that are in sight; does nothing if they are there."""
        if self._in_sight.children:
            return
        children: list[w.Widget] = []
        for section, title in TITLES.items():
            names = [name for name in MAIN if name.startswith(f"{section}.")]
            if names:
                about = RunParams.model_fields[section].description
                children.append(w.HTML(f'<h4 class="mm-title">{title} <span class="mm-quiet">{about}</span></h4>'))
            children += [self.row(name) for name in names]
        self._in_sight.children = children

    def row(self, name: str) -> FieldRow:
        """Return the row of a field. Raises KeyError for an unknown name."""
        if name not in self.rows:
            self.rows[name] = self._make_row(name, self.params)
        return self.rows[name]

    def reveal(self, name: str) -> FieldRow:
        """Unfold a field, and return its row. Raises KeyError for an unknown name."""
        for index, names in enumerate(self._folded):
            if name in names:
                self._panes.selected_index = index
        return self.row(name)

    def choose(self, name: str, value: Any) -> None:
        """Take a plain value for a field, as if it was typed: a mistake is named next to it, and in `error`."""
        self.row(name).choose(value)

    def show(self, params: RunParams) -> None:
        """Fill the form with these parameters."""
        for row in self.rows.values():
            row.show(params)
        self.error, self.params = self._held, params
        self._note.value = ""

    def hold(self, error: ParamError | None) -> None:
        """Keep a mistake that no model of the parameters knows, such as a folder without data. None ends it."""
        self._held = error
        if error is None:
            self._edited()
        else:
            self.error = error

    def flag(self, error: ParamError | None) -> None:
        """Show a mistake that only the plan of the present choices found, next to its field. None clears it."""
        if not self.error:
            self._mark(error)

    # Own code

    def allow(self, params: RunParams) -> None:
        """Let the own code of these parameters run in this kernel: the person has asked for it."""
        new = set(map(repr, own_fields(params))) - _allowed
        if new:
            _allowed.update(new)
            self.allowed += 1

    def _allow_new(self, before: RunParams, params: RunParams) -> None:
        """Let own code run that the person has just typed."""
        known = own_fields(before)
        typed = [each for each in own_fields(params) if each not in known]
        _allowed.update(map(repr, typed))

    def check_allowed(self, params: RunParams) -> None:
        """Raise ParamError if the plan would run own code that only a file names: somebody may have handed it over.

        Code that the person has typed, tried or launched, or of a run that they have started, may run.
        """
        own_code = own_fields(params)
        if any(field in RUN_BY_PLANS for field, _ in own_code):
            self._check_allowed(own_code)

    def check_launcher_allowed(self, params: RunParams) -> None:
        """Raise ParamError if ranks would be started by own code that only a file names."""
        self._check_allowed([each for each in own_fields(params) if each[0] == "launch.executor"])

    def _check_allowed(self, fields: list[tuple[str, OwnCode]]) -> None:
        for field, value in fields:
            if repr((field, value)) not in _allowed:
                words = (
                    f"{path_of(value)!r} comes from a file; it is not run before you press Try next to it, or Launch"
                )
                raise ParamError(field, words)

    # Widgets

    def _make_panes(self) -> None:
        """Make the panes of the other fields, without their rows: those are made when a pane is first opened."""
        titles = []
        for section, title in TITLES.items():
            folded = [name for name in field_names() if name.startswith(f"{section}.") and name not in MAIN]
            self._folded.append(folded)
            titles.append(f"More: {title.lower()} ({len(folded)})")
        self._panes = w.Accordion([w.VBox() for _ in titles], titles=titles, selected_index=None)
        self._panes.observe(lambda change: self._open_pane(change.new), "selected_index")

    def _make_row(self, name: str, params: RunParams) -> FieldRow:
        if names_own_code(field_of(name).annotation):
            return OwnRow(name, params, changed=self._edited, allow=self.allow)
        return FieldRow(name, params, changed=self._edited)

    def _open_pane(self, index: int | None) -> None:
        """Make the rows of a pane that was never open before."""
        if index is not None and not self._panes.children[index].children:
            self._panes.children[index].children = [self.row(name) for name in self._folded[index]]

    def _find(self, search: str) -> None:
        """Show the fields that hold a text, of all panes, in place of the form."""
        search = search.strip()
        rows = []
        if search:
            names = [*MAIN, *(name for pane in self._folded for name in pane)]
            rows = [self.row(name) for name in names if self.row(name).is_found_by(search)]
        words = f"{len(rows)} parameters with {search!r}" if search else ""
        self.found.children = [w.HTML(note(words, role="status")), *rows]
        self.found.layout.display = None if search else "none"
        self.sheet.layout.display = "none" if search else None

    # Edits

    def choose_preset(self, name: str) -> None:
        """Fill the form from a preset, or again from the file that it was made from."""
        try:
            self.aside, self._held = {}, None
            self.show(self._begin_with(name))
        except (OSError, ValueError) as error:
            self._note.value = note(error, "error", role="alert")

    def _edited(self) -> None:
        """Take the rows as they stand: valid parameters, or the error next to its field."""
        try:
            values = {name: row.value for name, row in self.rows.items() if row.is_edited(self.params)}
            params = self._changed(self._without_reader(self._with_warmup(values)))
            self._allow_new(self.params, params)
            self.show(params)
        except ParamError as error:
            self.error = error
            self._mark(error)

    def _changed(self, values: dict[str, Any]) -> RunParams:
        """Return the parameters with these values. Raises ParamError.

        A choice of sharding that they refuse, and with which it would have no effect, is set aside until it has one
        again: KEEP while the backend is DDP, a budget while AUTO is not chosen.
        """
        aside = {name: value for name, value in self.aside.items() if name not in values}
        for names in ([*aside], *([name] for name in aside)):
            with suppress(ParamError):
                params = self.params.change(**{name: aside[name] for name in names}, **values)
                self.aside = {name: value for name, value in aside.items() if name not in names}
                return params
        choices = leaves(self.params.to_dict())
        while True:
            try:
                params = self.params.change(**values)
            except ParamError as error:
                name = error.field
                if name in values or not name.startswith("fsdp.") or name not in choices:
                    raise
                refused = error
                values, aside = values | {name: default_of(name)}, aside | {name: choices[name]}
                continue
            if any(name not in self.aside and not params.why_idle(name) for name in aside):
                raise refused
            self.aside = aside
            return params

    def _begin_with(self, config: str) -> RunParams:
        """Return a preset or a file with the changes; the warm-up follows the steps unless it is among them."""
        params, changes = load(config), dict(self._changes)
        self._warmup_is_set = WARMUP in changes
        self._warmup_share = params.train.warmup_steps / params.train.steps
        steps = changes.get("train.steps")
        if not self._warmup_is_set and isinstance(steps, int):
            changes[WARMUP] = round(self._warmup_share * max(0, steps))
        return params.change(**changes)

    def _with_warmup(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values whose warm-up has the same share of the steps as before, unless somebody has set it."""
        train = self.params.train
        if values.get(WARMUP, train.warmup_steps) != train.warmup_steps:
            self._warmup_is_set = True
        steps = values.get("train.steps")
        if self._warmup_is_set or not isinstance(steps, int) or not 0 < steps != train.steps:
            return values
        return values | {WARMUP: round(self._warmup_share * steps)}

    def _without_reader(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values that unset the own reader where a person has chosen another source: a reader is a source."""
        data = self.params.data
        of_reader = [source for source in DataSource if source.takes.chosen_by == "reader"]
        other_source = values.get("data.source", data.source) not in (data.source, *of_reader)
        if data.reader is None or not other_source:
            return values
        return values | {"data.reader": None}

    def _mark(self, error: ParamError | None) -> None:
        """Show a mistake next to its field, which is unfolded, or on top if it belongs to no field."""
        field = words = ""
        if error:  # of a plan: without the section
            field = next((name for name in field_names() if f".{name}".endswith(f".{error.field}")), "")
            words = error.message
        if error and not field:  # of an entry of a field, such as train.freeze_from.500
            field = next((name for name in field_names() if error.field.startswith(f"{name}.")), "")
            words = f"{error.field.removeprefix(f'{field}.')}: {words}"
        if field:
            self.reveal(field)
        for name, row in self.rows.items():
            row.mark(words if name == field else "")
        self._note.value = note(error, "error", role="alert") if error and not field else ""
