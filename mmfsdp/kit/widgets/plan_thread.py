"""Planner: plans the newest choices of a form in a thread, and tells who shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...params import ParamError, RunParams
from .cell import import_lock
from .form import RunForm
from .planned_run import PlannedRun
from .worker import Worker


class Planner(Worker):
    """Makes the plans of a form's choices, one at a time; of choices that wait, only the newest.

    Plans are made in a thread: torch takes seconds to import, and activations are counted by running the model on fake
    tensors. `failure` is what kept the present choices from being planned.
    """

    def __init__(self, form: RunForm, *, show: Callable[[], None]):
        """show: called in the thread whenever `planned`, `failure` or `busy` changed."""
        super().__init__()
        self.planned: PlannedRun | None = None
        """The newest plan."""
        self._form, self._show = form, show
        self._has_flagged = False  # a mistake of the plan stands beside its field

    def request(self, params: RunParams) -> None:
        """Plan these choices, after what the thread is doing now."""
        self.work("plan", lambda: self._plans(params), show=self._take)

    def wait(self) -> PlannedRun:
        """Wait for the plan of the present choices. Raises the error that kept it from being made."""
        self.wait_for_work()
        if self.failure:
            raise self.failure
        assert self.planned is not None
        return self.planned

    def show_error(self, name: str, error: Exception) -> None:
        """Show a mistake that only the plan found beside its field; `busy_changed` shows the failure."""
        if isinstance(error, ParamError):
            self._form.flag(error)
            self._has_flagged = True

    def busy_changed(self) -> None:
        """Show the plan, or why there is none, once it is complete."""
        if not self.busy:
            self._show()

    def _plans(self, params: RunParams) -> Iterator[PlannedRun]:
        """Yield the plan of these choices: without activations, with them, then with a batch of the data."""
        self._form.check_allowed(params)
        with import_lock:
            from ..train.prepare import previews, rates_of

            if not self.is_wanted:  # other choices may have been made while the lock was awaited
                return
            stages = previews(params, for_auto=True)
            plan, cost = next(stages)
            rates = rates_of(params, plan)
        counting = not (plan.memory_events or plan.refused)
        newest = PlannedRun(params, plan, cost, rates, counting=counting)
        yield newest
        for complete in stages:  # each takes longer than the one before
            newest = PlannedRun(params, *complete, rates)
            yield newest
        if newest.counting:  # nobody knows the inputs
            yield replace(newest, counting=False)

    def _take(self, planned: PlannedRun) -> None:
        if self._has_flagged:
            self._form.flag(None)
            self._has_flagged = False
        self.planned = planned
        self._show()
