"""PlanView: the plan of the choices in a form, drawn again when they change, with what differs from a pinned one."""

from __future__ import annotations

import threading

import ipywidgets as w

from ..core.plan import WrapPlan
from ..params import ParamError, RunParams
from .cell import CellWidget, import_lock
from .form import RunForm
from .markup import error_note, note
from .plan_page import LAPTOP, PAGE_MACHINES, PlannedRun, plan_page


class PlanView(CellWidget):
    """Units, memory, traffic, expected time and findings of a plan, before any rank starts.

    plan is the newest one, None before the first; page is the HTML that shows it. Plans are made in a thread: torch
    takes seconds to import, and activations are counted by running the model on fake tensors.
    """

    def __init__(self, form: RunForm, *, machine: str = LAPTOP):
        """machine: the hardware of the ranks, one of PAGE_MACHINES; for a laptop no seconds are predicted."""
        self._requested = form.params
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # lives only while there is something to plan
        self._closed = False
        self._shown: PlannedRun | None = None
        self._pinned: PlannedRun | None = None
        self._failure: Exception | None = None
        self._machine = w.Dropdown(options=PAGE_MACHINES, value=machine, description="machine")
        self._machine.observe(lambda _: self._draw(), "value")
        self.pin = w.ToggleButton(description="Pin to compare", icon="thumb-tack")
        self.pin.observe(self._pin_plan, "value")
        self._note, self.page = w.HTML(), w.HTML()
        bar = w.HBox([self._machine, self.pin, self._note])
        bar.add_class("mm-row")
        super().__init__([bar, self.page])
        self.add_class("mm-form")
        self._follow(form)
        self.replace_older()

    @property
    def plan(self) -> WrapPlan | None:
        """The newest plan."""
        return self._shown.plan if self._shown else None

    def wait(self) -> WrapPlan:
        """Wait for the plan of the present choices. Raises the error that kept it from being made."""
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._failure:
            raise self._failure
        assert self.plan is not None
        return self.plan

    def close(self) -> None:
        """Remove the view; its thread ends."""
        self._closed = True
        super().close()

    def _follow(self, form: RunForm) -> None:
        """Show the plans of this form, and of the one that replaces it."""
        if self._closed:
            return
        self._form = form
        form.observe(lambda change: self._request(change.new), "params")
        form.observe(lambda change: self._follow(change.new), "successor")
        form.observe(lambda _: self._request(form.params), "allowed")
        self._request(form.params)

    def _request(self, params: RunParams) -> None:
        """Plan these choices, after what the thread is doing now; older choices that wait are dropped."""
        if self._closed:
            return
        self._note.value = note("planning…", role="status")
        with self._lock:
            self._requested = params
            if self._thread is None:
                self._thread = threading.Thread(target=self._make_plans, daemon=True, name="plan")
                self._thread.start()

    def _make_plans(self) -> None:
        """Show the plan of the newest choices, in a thread, until there are no newer ones."""
        while True:
            params = self._requested
            try:
                self._form.check_allowed(params)
                with import_lock:
                    from ..train.prepare import previews, rates_of

                    stages = previews(params)
                    if self._wanted(params):  # other choices may have been made while the lock was awaited
                        plan, cost = next(stages)
                        rates = rates_of(params, plan)
                        self._show(PlannedRun(params, plan, cost, rates))
                if self._wanted(params):
                    for plan, cost in stages:  # counts activations, which takes longer
                        self._show(PlannedRun(params, plan, cost, rates))
            except Exception as error:  # the thread goes on: the error is shown, and wait() raises it
                if self._wanted(params):
                    self._failure = error
                    self.page.layout.display = "none"
                    self._note.value = error_note(error, role="status")
                    if isinstance(error, ParamError):
                        self._form.flag(error)
            with self._lock:
                if self._closed or params is self._requested:
                    self._thread = None
                    return

    def _wanted(self, params: RunParams) -> bool:
        """Return False once other choices were made, or the view is closed."""
        return params is self._requested and not self._closed

    def _show(self, planned: PlannedRun) -> None:
        """Show a plan if it is of the newest choices."""
        if not self._wanted(planned.params):
            return
        if isinstance(self._failure, ParamError):
            self._form.flag(None)
        self._failure, self._shown = None, planned
        complete = planned.cost.peak is not None or planned.plan.refused  # what is refused has no activations
        self._note.value = "" if complete else note("counting activations…", role="status")
        self.page.layout.display = None
        self._draw()

    def _pin_plan(self, _: object) -> None:
        self._pinned = self._shown if self.pin.value else None
        self._draw()

    def _draw(self) -> None:
        if self._shown:
            self.page.value = plan_page(self._shown, machine=self._machine.value, pinned=self._pinned)
