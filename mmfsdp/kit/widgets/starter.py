"""Starter: launches runs with the choices of a form, in a thread, so that the kernel stays free."""

from __future__ import annotations

from collections.abc import Callable

from ...params import RunParams
from ...params.own import own_fields
from ..run.adopt import find_same
from ..run.handle import Run
from ..run.interrupt import interruptible
from ..run.launch import launch
from ..run.start import free_name, runs_folder
from .cell import import_lock
from .form import RunForm
from .worker import Worker


class Starter(Worker):
    """Launches one run at a time, or finds the one that was launched with the same choices before.

    `failure` is what kept the newest launch from starting a run, or the run from being stopped or resumed.
    """

    def __init__(self, form: RunForm, *, show: Callable[[], None]):
        """show: called, in any thread, when an attribute changed."""
        super().__init__()
        self.run: Run | None = None
        """The newest run."""
        self.launched: RunParams | None = None
        """The choices of the newest run; None for one that was opened."""
        self.words = ""
        """A note on the newest launch."""
        self._form, self._show = form, show

    def start(self, params: RunParams, *, adopt: bool = True) -> None:
        """Start a run, and return immediately. Raises the form's mistake, if it has one.

        adopt: a run of that name with the same parameters is shown instead, whatever has become of it.
        """
        if self.is_under_way("launch"):
            return
        if self._form.error:
            raise self._form.error
        self.launched, self.failure, self.words = self._form.params, None, ""
        self._form.allow(params)
        self.work("launch", lambda: self._launch(params, adopt))

    def find(self, params: RunParams) -> None:
        """Look for a run of this name with the same parameters, and return immediately.

        Own code is not imported for it: only a person lets that run.
        """
        if not own_fields(params):
            self.work("find", lambda: find_same(params).run, show=lambda run: self._take(run, params))

    def _take(self, run: Run | None, params: RunParams) -> None:
        """Show a run that was found, unless another one has been started."""
        if run is not None and self.run is None:
            self.run, self.launched = run, params

    def forget(self) -> None:
        """Forget what was said of a launch: the choices are others now."""
        if not self.busy:
            self.failure, self.words = None, ""

    def open(self, run: Run) -> None:
        """Show a run that is there already. Raises ValueError if its parameters cannot be read."""
        here = self._form.params.launch
        place = {"launch.name": here.name, "launch.folder": here.folder, "launch.replace": here.replace}
        self.launched, self.run = run.params.change(**place), run
        self._show()

    def wait(self) -> Run:
        """Wait until the run is started. Raises the error that kept it from starting.

        Interrupting the cell ends the waiting, not the run.
        """
        with interruptible("the launch goes on"):
            self.wait_for_work()
        if self.failure:
            raise self.failure
        assert self.run, "nothing was launched; call launch() first"
        return self.run

    def stop(self) -> None:
        """Cancel the newest run, without waiting for it."""
        self._act("stop", lambda run: run.cancel())

    def resume(self) -> None:
        """Resume the newest run, without waiting for it."""

        def go_on(run: Run) -> None:
            run.resume()
            self.run = Run(run.path)

        self._act("resume", go_on)

    def show_error(self, name: str, error: Exception) -> None:
        """Forget the choices that could not be launched; `busy_changed` shows the failure."""
        if name == "launch":
            self.launched = None

    def busy_changed(self) -> None:
        """Show the newest run, or what is being done."""
        self._show()

    def _act(self, name: str, act: Callable[[Run], object]) -> None:
        """Do something with the newest run, unless something is being done."""
        run = self.run
        assert run is not None
        if not self.busy:
            self.failure = None
            self.work(name, lambda: act(run))

    def _launch(self, params: RunParams, adopt: bool) -> None:
        with import_lock:
            from ..train.prepare import prepare
        if not params.launch.replace:
            match = find_same(params)
            if adopt and match.run is not None:
                self.run = match.run
                return
            params, self.words = self._free_name(params) if match.run else (match.params, match.words)
        self.run = launch(prepare(params, activations=True))  # its errors are shown here, before a rank starts

    def _free_name(self, params: RunParams) -> tuple[RunParams, str]:
        """Return the parameters with a name that no run has."""
        name = free_name(runs_folder(params.launch), params.launch.name)
        return params.change(**{"launch.name": name}), f"This one is {name}."
