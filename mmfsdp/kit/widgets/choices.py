"""Choices: the few parameters that a person changes to see what they do, as buttons, sliders and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as w

from ...params import Backend, FrozenDtype, FrozenPolicy, ParamError, Precision
from ...predict import LAPTOP
from ..run.rank_count import crowding
from .controls import Budget, Buttons, Control, Number, PowerSlider
from .data_look import DataLook
from .fit_button import FitButton
from .form import RunForm
from .markup import note
from .planned_run import PAGE_MACHINES, PlannedRun, fit_html, room_at_peak

AS_LOADED = "as is"
"""Chooses no format: weights stay in the one in which they were loaded."""
MAX_RANKS, MAX_BATCH = 10, 12
"""Exponents of the sliders' ends: 1,024 ranks, 4,096 samples."""


class Choices(w.VBox):
    """The choices of a form that are in sight. A mistake stands below the input where it was made."""

    def __init__(self, form: RunForm, *, machine: str, redraw: Callable[[], None]):
        """machine: one of planned_run.PAGE_MACHINES. redraw: called when another machine was chosen."""
        self._form = form
        choose = form.choose
        self.data = DataLook(take=self._take_data, refuse=form.hold)
        numbers = [
            Number("train.steps", "steps", choose),
            Number("train.lr", "lr", choose),
        ]
        self.budget = Budget("fsdp.memory_budget_gib", "budget", choose)
        self.controls: list[Control] = [
            Buttons(
                "fsdp.frozen_policy", "how frozen weights are held", meanings(FrozenPolicy), choose, with_meaning=True
            ),
            self.budget,
            Buttons("fsdp.backend", "backend", meanings(Backend), choose),
            PowerSlider("launch.ranks", "ranks", choose, highest=MAX_RANKS),
            PowerSlider("train.batch_size", "batch", choose, highest=MAX_BATCH),
            *numbers,
            Buttons("fsdp.mixed_precision", "compute", meanings(Precision), choose, unset=AS_LOADED),
            Buttons("fsdp.frozen_dtype", "frozen in", meanings(FrozenDtype), choose, unset=AS_LOADED),
            self.data,
        ]
        self.machine = w.Dropdown(options=PAGE_MACHINES, value=machine, description="fits on")
        self.machine.observe(lambda _: redraw(), "value")
        self._fit, self._crowded = w.HTML(), w.HTML()
        by_name = {control.name: control for control in self.controls}
        row = w.HBox(numbers)
        row.add_class("mm-numbers")
        children: list[w.Widget] = []
        for name, control in by_name.items():
            if name == "train.steps":
                children.append(row)
            elif control not in numbers and control is not self.data:
                children.append(control)
            if name == "launch.ranks":
                children.append(self._crowded)
        self.fit_button: FitButton | None = None
        """Made for the first plan that does not fit on a GPU."""
        self._fits = w.VBox([self.machine, self._fit], layout=w.Layout(grid_gap="4px"))
        super().__init__([*children, self._fits, self.data])
        self.add_class("mm-choices")
        self.show()

    def show(self) -> None:
        """Show the form's parameters, and its mistake where it was made, if there is one."""
        params, error = self._form.params, self._form.error
        for control in self.controls:
            if error is None:
                control.show(params)
            control.mark(error.message if error and is_of(error, control.name) else "")
        typed_budget = error is not None and is_of(error, self.budget.name)
        is_idle = bool(params.why_idle(self.budget.name))
        self.budget.layout.display = "none" if is_idle and not typed_budget else None
        words = crowding(params)
        self._crowded.value = note(words, "warning") if words else ""
        self._crowded.layout.display = None if words else "none"

    def show_fit(self, planned: PlannedRun) -> None:
        """Show whether a plan fits into the memory of the machine, and how long a step is expected to take there."""
        machine = self.machine.value
        self._fit.value = fit_html(planned, machine)
        is_enough = machine == LAPTOP or room_at_peak(planned, machine).is_enough
        if self.fit_button is None and not is_enough:
            self.fit_button = FitButton(self._form)
            self._fits.children = [*self._fits.children, self.fit_button]
        if self.fit_button is not None:
            self.fit_button.update(machine, is_enough=is_enough)

    def names_mistake(self, error: ParamError) -> bool:
        """Return True if the mistake stands below one of these inputs."""
        return any(is_of(error, control.name) for control in self.controls)

    def _take_data(self, values: dict[str, Any]) -> None:
        """Take the data that were found at a path, in place of an own reader's.

        Raises ParamError where the model cannot learn from them.
        """
        self._form.show(self._form.params.change(**values, **{"data.reader": None}))


def meanings(choice: Any) -> dict[str, str]:
    """Return the values of an enum with what they mean."""
    return {str(member.value): getattr(member, "description", "") or str(member.value) for member in choice}


def is_of(error: ParamError, name: str) -> bool:
    """Return True if a mistake is in this parameter; a plan's leaves out the section."""
    return bool(error.field) and f".{name}".endswith(f".{error.field}")


DEFAULT_MACHINE = LAPTOP
