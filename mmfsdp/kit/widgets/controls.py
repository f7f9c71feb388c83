"""Inputs for one parameter each: buttons, a slider in powers of two with a number beside it, a number."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import ipywidgets as w

from ...params import RunParams
from ...params.base import plain
from ...params.in_words import size
from .markup import note

Choose = Callable[[str, Any], None]
"""Called with a parameter's dotted name and what was typed or pressed."""


class Control(w.VBox):
    """The input of a parameter, and below it what the value means, or what is wrong with it."""

    def __init__(self, name: str, children: list[w.Widget], choose: Choose):
        self.name = name
        self._choose, self._filling = choose, False
        self._idle = ""
        self.words = w.HTML()
        super().__init__([*children, self.words])
        self.add_class("mm-control")

    def show(self, params: RunParams) -> None:
        """Show the value that these parameters have."""
        self._filling = True
        self.fill(plain(attrgetter(self.name)(params)), params)
        self._filling = False
        self._idle = self.why_idle(params)
        for part in self.inputs:
            part.disabled = bool(self._idle)
        (self.add_class if self._idle else self.remove_class)("mm-idle")
        self.mark("")

    def why_idle(self, params: RunParams) -> str:
        """Return why no value has an effect beside these parameters; "" if one has."""
        return params.why_idle(self.name)

    @property
    def inputs(self) -> list[Any]:
        """The widgets that a choice without effect disables."""
        return []

    def fill(self, value: Any, params: RunParams) -> None:
        """Put a value into the input."""
        raise NotImplementedError

    def mark(self, error: str) -> None:
        """Show a mistake below the input; without one why it has no effect, or what the value means."""
        if error:
            self.words.value = note(error, "error", role="alert")
        else:
            self.words.value = note(self._idle) if self._idle else self.about()
        self.words.layout.display = None if self.words.value else "none"

    def about(self) -> str:
        """Return what the value means, as HTML."""
        return ""

    def typed(self, value: Any) -> None:
        """Hand over what a person has typed or pressed."""
        if not self._filling:
            self._choose(self.name, value)


class Buttons(Control):
    """One button for each value, with its meaning below."""

    def __init__(
        self,
        name: str,
        label: str,
        values: dict[str, str],
        choose: Choose,
        *,
        unset: str = "",
        with_meaning: bool = False,
    ):
        """values: the meaning of each. unset: a button for no value.

        with_meaning: show what the pressed one means, and the label above the buttons.
        """
        self.unset = unset
        if unset:
            values = {unset: f"the format in which weights were loaded: {name} is not set"} | values
        self._meanings = values if with_meaning else {}
        self.toggles = w.ToggleButtons(options=list(values), tooltips=list(values.values()))
        self.toggles.style.button_width = "auto"
        super().__init__(name, [w.HTML(f'<span class="mm-quiet" title="{name}">{label}</span>'), self.toggles], choose)
        self.add_class("mm-buttons")
        if not with_meaning:
            self.add_class("mm-aside")
        self.toggles.observe(lambda change: self.typed(None if change.new == self.unset else change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Press the button of a value."""
        word = self.unset if value is None else str(value)
        self.toggles.value = word if word in self.toggles.options else None

    @property
    def inputs(self) -> list[Any]:
        """The buttons."""
        return [self.toggles]

    def about(self) -> str:
        """Return the meaning of the pressed button."""
        words = self._meanings.get(str(self.toggles.value), "")
        return note(words.replace("`", "")) if words else ""


class PowerSlider(Control):
    """A slider in powers of two, with a number typed beside it."""

    def __init__(self, name: str, label: str, choose: Choose, *, highest: int):
        """highest: exponent of the slider's end; larger numbers can be typed."""
        self._highest = highest
        self.slider = w.IntSlider(
            min=0, max=highest, description=label, readout=False, continuous_update=False, tooltip=name
        )
        self.number = w.Text(continuous_update=False, tooltip=name)
        row = w.HBox([self.slider, self.number])
        row.add_class("mm-power")
        super().__init__(name, [row], choose)
        self.number.add_class("mm-short")
        self.slider.observe(lambda change: self.typed(2**change.new), "value")
        self.number.observe(lambda change: self.typed(change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Move the slider to the nearest power of two, and write the number."""
        self.number.value = "" if value is None else str(value)
        self.number.placeholder = "unset"
        self.slider.value = min(self._highest, round(math.log2(value))) if value else 0


class Number(Control):
    """A number that is typed."""

    def __init__(self, name: str, label: str, choose: Choose):
        self.number = w.Text(description=label, continuous_update=False, tooltip=name)
        super().__init__(name, [self.number], choose)
        self.add_class("mm-number")
        self.number.observe(lambda change: self.typed(change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Write the number."""
        self.number.value = "" if value is None else str(value)


class Budget(Control):
    """A budget of memory: a slider between what SHARD and what REPLICATE need, with the number in GiB beside it."""

    def __init__(self, name: str, label: str, choose: Choose):
        self._range: tuple[int, int] | None = None
        self.slider = w.IntSlider(
            min=0, max=BUDGET_STEPS, description=label, readout=False, continuous_update=False, tooltip=name
        )
        self.number = w.Text(continuous_update=False, tooltip=f"{name}, in GiB")
        row = w.HBox([self.slider, self.number])
        row.add_class("mm-power")
        super().__init__(name, [row], choose)
        self.number.add_class("mm-short")
        self.slider.observe(lambda change: self._moved(change.new), "value")
        self.number.observe(lambda change: self.typed(change.new or None), "value")

    @property
    def inputs(self) -> list[Any]:
        """The slider and the number."""
        return [self.slider, self.number]

    def show_range(self, least_and_most: tuple[int, int] | None, params: RunParams) -> None:
        """Put the slider between these bytes; None while they are not known."""
        self._range = least_and_most
        self.show(params)

    def fill(self, value: Any, params: RunParams) -> None:
        """Move the slider as near as it comes, and write the number."""
        self.number.value = "" if value is None else str(value)
        self.number.placeholder = "GiB"
        if self._range and value is not None:
            least, most = self._range
            share = (value * 2**30 - least) / max(1, most - least)
            self.slider.value = min(BUDGET_STEPS, max(0, round(BUDGET_STEPS * share)))

    def about(self) -> str:
        """Return the budget in bytes, and what it lies between."""
        if not self._range:
            return note(LOOKING_FOR_BUDGETS, role="status") if self.number.value else ""
        least, most = self._range
        words = f"SHARD needs {size(least)}, REPLICATE {size(most)}"
        if self.number.value:
            words = f"{size(float(self.number.value) * 2**30)} for each rank; {words}"
        return note(words)

    def _moved(self, place: int) -> None:
        if self._range:
            least, most = self._range
            self.typed(gib_for(least + (most - least) * place / BUDGET_STEPS))


LOOKING_FOR_BUDGETS = "looking for what SHARD and REPLICATE need…"
BUDGET_STEPS = 20
"""Places of a budget's slider between the least and the most."""


def gib_for(nbytes: float) -> float:
    """Return at least so many bytes in GiB, with four digits."""
    gib = nbytes / 2**30
    digit = 10.0 ** (math.floor(math.log10(gib)) - 3)
    return float(f"{math.ceil(gib / digit) * digit:.4g}")
