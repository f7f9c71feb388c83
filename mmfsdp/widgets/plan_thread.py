"""Planner: plans the newest choices of a form in a thread, and tells who shows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ..params import ParamError, RunParams
from .cell import import_lock
from .form import RunForm
from .planned_run import PlannedRun


class Planner:
    """Makes the plans of a form's choices, one at a time; of choices that wait, only the newest.

    Plans are made in a thread, which lives only while there is something to plan: torch takes seconds to import, and
    activations are counted by running the model on fake tensors.
    """

    def __init__(self, form: RunForm, *, show: Callable[[], None]):
        """show: called in the thread whenever `planned`, `failure` or `busy` changed."""
        self.planned: PlannedRun | None = None
        """The newest plan."""
        self.failure: Exception | None = None
        """What kept the present choices from being planned."""
        self._form, self._show = form, show
        self._wanted = form.params
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """True while a plan of the present choices is being made."""
        return self._thread is not None

    def request(self, params: RunParams) -> None:
        """Plan these choices, after what the thread is doing now."""
        with self._lock:
            self._wanted = params
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, daemon=True, name="plan")
                self._thread.start()

    def wait(self) -> PlannedRun:
        """Wait for the plan of the present choices. Raises the error that kept it from being made."""
        thread = self._thread
        if thread is not None:
            thread.join()
        if self.failure:
            raise self.failure
        assert self.planned is not None
        return self.planned

    def close(self) -> None:
        """Plan no more."""
        self._closed = True

    def _is_wanted(self, params: RunParams) -> bool:
        """Return False once other choices were made, or nobody looks any more."""
        return params is self._wanted and not self._closed

    def _work(self) -> None:
        """Plan the newest choices until there are no newer ones."""
        while True:
            params = self._wanted
            try:
                self._form.check_allowed(params)
                self._plan(params)
            except Exception as error:  # the thread goes on: the error is shown, and wait() raises it
                if self._is_wanted(params):
                    self.failure = error
                    if isinstance(error, ParamError):
                        self._form.flag(error)
            with self._lock:
                is_last = self._closed or params is self._wanted
                if is_last:
                    self._thread = None
            if not self._closed:
                self._show()
            if is_last:
                return

    def _plan(self, params: RunParams) -> None:
        with import_lock:
            from ..train.prepare import previews, rates_of

            if not self._is_wanted(params):  # other choices may have been made while the lock was awaited
                return
            stages = previews(params, for_auto=True)
            plan, cost = next(stages)
            rates = rates_of(params, plan)
        counting = not (plan.memory_events or plan.refused)
        newest = PlannedRun(params, plan, cost, rates, counting=counting)
        while self._is_wanted(params):
            self._take(newest)
            complete = next(stages, None)  # with its activations, then with a batch of the data, which takes longer
            if complete is None:
                break
            newest = PlannedRun(params, *complete, rates)
        if newest.counting:  # nobody knows the inputs
            self._take(replace(newest, counting=False))

    def _take(self, planned: PlannedRun) -> None:
        if not self._is_wanted(planned.params):
            return
        if isinstance(self.failure, ParamError):
            self._form.flag(None)
        self.failure, self.planned = None, planned
        self._show()
