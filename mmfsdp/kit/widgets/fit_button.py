"""FitButton: changes a run so that it fits on a GPU, by what `mmfsdp fit` finds."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import ipywidgets as w

from ...params import RunParams
from ...predict import machine_of_run
from .cell import import_lock
from .form import RunForm
from .markup import note
from .worker import Worker

if TYPE_CHECKING:
    from ..train.fit_answers import Answer, Fit

FIT, FITTING = "Make it fit", "looking for what fits…"
TIP = "Take the largest batch that fits, as `mmfsdp fit` does; if none does, another policy, or more GPUs"
TRIED = ("batch", "policy", "gpus")
"""Questions to `fit`, one after the other, until something fits; all but the first with a batch of 1."""


class FitButton(Worker, w.VBox):
    """A button that is there while a plan does not fit, and below it what was changed."""

    def __init__(self, form: RunForm) -> None:
        self._form, self._machine = form, ""
        self._answered: RunParams | None = None
        """The choices that the newest answer has made."""
        self.button = w.Button(description=FIT, icon="compress", tooltip=TIP, layout=w.Layout(width="auto"))
        self.button.on_click(lambda _: self.press())
        self._result = self.error_line = w.HTML()
        super().__init__([self.button, self._result])

    def update(self, machine: str, *, is_enough: bool) -> None:
        """Show the button where the memory is not enough. machine: one of predict.MACHINES."""
        self._machine = machine
        self.button.layout.display = "none" if is_enough else None
        if not self.busy and self._form.params != self._answered:
            self._result.value = ""

    def press(self) -> None:
        """Look for what fits, and return immediately."""
        if not self.busy:
            params, machine = self._form.params, self._machine
            self._result.value = note(FITTING, role="status")
            self.work("fit", lambda: _solve(params, machine), show=lambda solved: self._take(params, *solved))

    def busy_changed(self) -> None:
        """Disable the button while it works."""
        self.button.disabled = self.busy

    def _take(self, params: RunParams, fitting: RunParams, solved: Fit) -> None:
        """Choose what fits, unless the person has chosen something else meanwhile."""
        if self._form.params != params:
            self._result.value = ""
            return
        self._answered = fitting
        self._form.show(fitting)
        (answer,) = solved.answers
        table = f'<pre class="mm-log mm-scroll" tabindex="0">{escape(str(solved))}</pre>'
        self._result.value = (
            note(_in_words(answer, solved), role="status") + f"<details><summary>how</summary>{table}</details>"
        )


def _solve(params: RunParams, machine: str) -> tuple[RunParams, Fit]:
    """Return the run, changed so that it fits, and the answer that says so; the run as it is where nothing fits."""
    with import_lock:
        from ..train.fit import fit
    changed = params
    for asked in TRIED:
        solved = fit(changed, machine_of_run(machine, params), asked)
        if solved.all_fit:
            return changed.change(**solved.answers[0].change), solved
        changed = params.change(**{"train.batch_size": 1})
    return params, solved


def _in_words(answer: Answer, solved: Fit) -> str:
    """Return what was changed in a line."""
    if not answer.value:
        return f"nothing fits on {solved.machine.name}, with one sample and any number of GPUs"
    if answer.asked == "batch":
        return f"batch {answer.value}: the largest that fits on {solved.machine.name}; it was {answer.now}"
    return f"batch 1, {answer.asked} {answer.value}: no batch fits on {solved.machine.name} with {answer.now}"
