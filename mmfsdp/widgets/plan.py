"""PlanView: the plan of the choices in a form, drawn anew when they change, and beside another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import ipywidgets as w

from ..params import ParamError, RunParams
from .form import RunForm
from .heavy import planned
from .newest import Newest
from .plan_page import MACHINES, Planned, page, side_by_side
from .style import Whole, note, replace_older

if TYPE_CHECKING:
    from ..estimate import Estimate
    from ..plan import WrapPlan


class PlanView(Whole):
    """Units, memory, traffic, expected time and findings of the plan that a form's choices make, before a rank starts.

    plan is the newest one, None before the first; page is the HTML that shows it. A thread makes them, since torch
    takes seconds to import, and activations are counted by running the model on tensors without storage.
    """

    def __init__(self, form: RunForm, *, machine: str = "laptop"):
        """machine: what the ranks are thought to run on, one of MACHINES."""
        self._worker: Newest[RunParams] = Newest(self._make)
        self._counter: Newest[tuple[RunParams, Iterator[tuple[WrapPlan, Estimate]]]] = Newest(self._count)
        self._wanted = form.params
        self._shown: Planned | None = None
        self._pinned: Planned | None = None
        self._failure: Exception | None = None
        self._machine = w.Dropdown(options=list(MACHINES), value=machine, description="machine")
        self._machine.observe(lambda _: self._draw(), "value")
        self._pin = w.Button(icon="thumb-tack")
        self._pin.on_click(lambda _: self.unpin() if self._pinned else self.pin())
        self._note, self.page = w.HTML(), w.HTML()
        bar = w.HBox([self._machine, self._pin, self._note])
        bar.add_class("mm-row")
        super().__init__([bar, self.page])
        self.add_class("mm-form")
        self._follow = lambda change: self._ask(change.new)
        self._move = lambda change: self._adopt(change.new)
        self.unpin()
        self._adopt(form)
        replace_older(self)

    @property
    def plan(self) -> WrapPlan | None:
        """The newest one."""
        return self._shown.plan if self._shown else None

    def wait(self) -> WrapPlan:
        """Wait for the plan of the present choices. Raises what kept it from being made."""
        self._worker.wait()
        self._counter.wait()
        if self._failure:
            raise self._failure
        assert self.plan is not None
        return self.plan

    def pin(self) -> None:
        """Keep the present plan in sight, beside those of later choices."""
        self._pinned = self._shown
        self._pin.description, self._pin.tooltip = "Unpin", "Show one plan only"
        self._draw()

    def unpin(self) -> None:
        """Show the plan of the present choices only."""
        self._pinned = None
        self._pin.description, self._pin.tooltip = "Pin to compare", "Keep this plan beside those of later choices"
        self._draw()

    def close(self) -> None:
        """Take it off the page; its thread ends. Doing so twice does no harm."""
        if not self._worker.closed:
            self._worker.close()
            self._counter.close()
            with suppress(ValueError):  # the form may have gone first, and has let go of its followers then
                self._form.unobserve(self._follow, "params")
                self._form.unobserve(self._move, "successor")
        super().close()

    def _adopt(self, form: RunForm) -> None:
        """Follow a form, or the one that has taken its place."""
        self._form = form
        form.observe(self._follow, "params")
        form.observe(self._move, "successor")
        self._ask(form.params)

    def _ask(self, params: RunParams) -> None:
        self._wanted = params
        self._say("planning…")
        self._worker.ask(params)

    def _make(self, params: RunParams) -> None:
        """In a thread: show the plan. What takes longer is for the other thread, so that this one can plan anew."""
        found = planned(params)
        if self._step(params, found):
            self._say("counting activations…")
            self._counter.ask((params, found))

    def _count(self, rest: tuple[RunParams, Iterator[tuple[WrapPlan, Estimate]]]) -> None:
        """In a thread: show the plan once more, with its activations."""
        if rest[0] is self._wanted:
            self._step(*rest)

    def _step(self, params: RunParams, found: Iterator[tuple[WrapPlan, Estimate]]) -> bool:
        """Show what is found next, if it is still wanted; True if there is more."""
        error: Exception | None = None
        try:
            made = Planned(params, *next(found))
        except Exception as caught:  # nobody is above this thread: it is shown, and raised by wait()
            error = caught
        if params is not self._wanted or self._worker.closed:
            return False
        was, self._failure = self._failure, error
        if error is None:
            self._shown = made
            self._draw()
        self.page.layout.display = "none" if error else None
        self._say(error)
        mistake = error if isinstance(error, ParamError) else None
        if mistake or isinstance(was, ParamError):
            self._form.flag(mistake)
        return error is None and not made.whole

    def _say(self, what: str | Exception | None) -> None:
        kind = "error" if isinstance(what, Exception) else "quiet"
        words = str(what or "") or (type(what).__name__ if what else "")
        self._note.value = note(words, kind, role="status")

    def _draw(self) -> None:
        """Show what there is; for another machine, the same plan."""
        if self._shown is None:
            return
        if self._pinned:
            self.page.value = side_by_side(self._pinned, self._shown, machine=self._machine.value)
        else:
            self.page.value = page(self._shown, machine=self._machine.value)
