"""RunForm: the main choices of a run as a form, made from the parameter dataclasses themselves."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as w
import traitlets

from ..params import ParamError, RunParams, load, preset_names
from ..style import STYLE
from .fields import Field, Row

MAIN = (
    "launch.name",
    "launch.ranks",
    "train.steps",
    "train.batch_size",
    "train.lr",
    "model.num_latents",
    "fsdp.backend",
    "fsdp.sharding_strategy",
    "fsdp.frozen_policy",
    "fsdp.auto_wrap_policy",
)
"""Dotted names of the fields that the form shows unless told otherwise."""


class RunForm(w.VBox):
    """The main choices of a run.

    params is the last possible choice, a RunParams; error is what is wrong with the present one, or None. Both are
    traits: `form.observe(callback, "params")`.
    """

    params = traitlets.Instance(RunParams)
    error = traitlets.Instance(ParamError, allow_none=True)

    def __init__(self, preset: str = "tiny", *, fields: tuple[str, ...] = MAIN, **changes: Any):
        """preset: a preset's name or a YAML file. changes: other values to begin with, by dotted name."""
        start = load(preset).change(**changes)
        self._preset = w.Dropdown(
            options=list(dict.fromkeys([preset, *preset_names()])), value=preset, description="preset"
        )
        self._preset.style.description_width, self._preset.layout.width = "9em", "23em"
        self._rows = {name: Row(Field.named(name), _at(start, name), changed=self._check) for name in fields}
        self._below = w.HTML()
        super().__init__([w.HTML(STYLE), self._preset, *self._rows.values(), self._below], params=start)
        self.add_class("mm-widget")
        self._preset.observe(lambda change: self.show(load(change.new).change(**changes)), "value")
        self.show(start)

    def show(self, params: RunParams) -> None:
        """Fill the form with these parameters; what it has no field for is kept too."""
        self._base: RunParams | None = None  # while it is being filled, no check
        for name, row in self._rows.items():
            row.value = _at(params, name)
        self._base = params
        self._check()

    def _check(self) -> None:
        """Take the choices as they stand: new params, or the error beside its field."""
        if self._base is None:
            return
        self.error = None
        try:
            params = self._base.change(**{name: row.value for name, row in self._rows.items()})
        except ParamError as error:
            self.error = error
        for name, row in self._rows.items():
            row.say(self.error.message if self.error and self.error.field == name else None)
        elsewhere = self.error and self.error.field not in self._rows
        self._below.value = f'<div class="mm-error">{escape(str(self.error))}</div>' if elsewhere else ""
        if not self.error:
            self.params = params


def _at(params: RunParams, name: str) -> Any:
    """The plain value of a field by its dotted name."""
    value: Any = params.to_dict()
    for part in name.split("."):
        value = value[part]
    return value
