"""Planner: plans the newest choices of a form in a thread, and tells who shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...params import FrozenPolicy, ParamError, RunParams
from .cell import import_lock
from .controls import LOOKING_FOR_BUDGETS
from .data_look import NotYet
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


class BudgetRange(Worker):
    """Finds between which budgets AUTO has something to choose, for the newest choices of a form.

    `failure` is what kept it from being found.
    """

    def __init__(self, form: RunForm, *, show: Callable[[], None]):
        """show: called in the thread whenever `least_and_most`, `failure` or `busy` changed."""
        super().__init__()
        self.least_and_most: tuple[int, int] | None = None
        """Bytes that a rank needs with all frozen units sharded, and replicated; None while they are not known."""
        self._form, self._show = form, show
        self._asked: RunParams | None = None

    def request(self, params: RunParams) -> None:
        """Find it for these choices, whatever their policy is, unless it is known."""
        fsdp = params.fsdp.change(frozen_policy=FrozenPolicy.SHARD, **params.fsdp.without_auto)
        params = params.change(fsdp=fsdp)
        if params != self._asked:
            self._asked, self.least_and_most, self.failure = params, None, None
            self.work("range", lambda: self._find(params), show=self._take)

    def show_error(self, name: str, error: Exception) -> None:
        """Let `busy_changed` show the failure."""

    def busy_changed(self) -> None:
        """Show the range, or why there is none."""
        if not self.busy:
            self._show()

    def _find(self, params: RunParams) -> tuple[int, int]:
        self._form.check_allowed(params)
        with import_lock:
            from ..train.prepare import budget_range

            return budget_range(params)

    def _take(self, least_and_most: tuple[int, int]) -> None:
        self.least_and_most = least_and_most


def why_not_chosen(form: RunForm, planner: Planner, budgets: BudgetRange) -> str:
    """Return why the plan that is drawn is not the one that is chosen, in words for a person; "" if it is.

    Nobody else compares the two.
    """
    error = form.error
    if error is not None and budgets.busy:
        return LOOKING_FOR_BUDGETS
    if isinstance(error, NotYet):
        return error.message
    if error is not None:
        return f"This is the choice before: {error.field} has a mistake"
    if planner.failure:
        return "This is the choice before: the new one cannot be planned"
    if planner.planned is None or planner.planned.params != form.params:
        return "planning…"
    return ""
