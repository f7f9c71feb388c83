"""Starter: launches runs with the choices of a form, in a thread, so that the kernel stays free."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..params import RunParams
from ..run.adopt import find_same
from ..run.handle import Run
from ..run.interrupt import interruptible
from ..run.launch import launch
from ..run.start import free_name, runs_folder
from .cell import import_lock
from .form import RunForm


class Starter:
    """Launches one run at a time, or finds the one that was launched with the same choices before."""

    def __init__(self, form: RunForm, *, show: Callable[[], None]):
        """show: called, in any thread, when an attribute changed."""
        self.run: Run | None = None
        """The newest run."""
        self.failure: Exception | None = None
        """What kept the newest launch from starting a run."""
        self.launched: RunParams | None = None
        """The choices of the newest run; None for one that was opened."""
        self.words = ""
        """What a person should know of the newest launch."""
        self._form, self._show = form, show
        self.busy = False
        """True while a run is being started."""
        self._shown = threading.Event()  # set once the newest run, or why there is none, is shown
        self._shown.set()

    def start(self, params: RunParams, *, adopt: bool = True) -> None:
        """Start a run, and return immediately. Raises the form's mistake, if it has one.

        adopt: a run of that name with the same parameters is shown instead, whatever has become of it.
        """
        if self.busy:
            return
        if self._form.error:
            raise self._form.error
        self.launched, self.failure, self.words = self._form.params, None, ""
        self._form.allow(params)
        self.busy = True
        self._shown.clear()
        self._show()
        threading.Thread(target=self._launch, args=(params, adopt), daemon=True, name="launch").start()

    def wait(self) -> Run:
        """Wait until the run is started. Raises the error that kept it from starting.

        Interrupting the cell ends the waiting, not the run.
        """
        with interruptible("the launch goes on"):
            self._shown.wait()  # not Thread.join: interrupted, Python 3.11 takes the thread for ended
        if self.failure:
            raise self.failure
        assert self.run, "nothing was launched; call launch() first"
        return self.run

    def stop(self) -> None:
        """Cancel the newest run."""
        self._try(lambda run: run.cancel())

    def resume(self) -> None:
        """Resume the newest run."""

        def go_on(run: Run) -> None:
            run.resume()
            self.run = Run(run.path)

        self._try(go_on)

    def _try(self, act: Callable[[Run], object]) -> None:
        assert self.run is not None
        self.failure = None
        try:
            act(self.run)
        except Exception as error:  # a thread ends here: the error is shown
            self.failure = error
        self._show()

    def _launch(self, params: RunParams, adopt: bool) -> None:
        try:
            with import_lock:
                from ..train.prepare import prepare
            if not params.launch.replace:
                match = find_same(params)
                if adopt and match.run is not None:
                    self.run = match.run
                    return
                params, self.words = self._free_name(params) if match.run else (match.params, match.words)
            self.run = launch(prepare(params, activations=True))  # its errors are shown here, before a rank starts
        except Exception as error:  # the thread ends here: the error is shown, and wait() raises it
            self.failure, self.launched = error, None
        finally:
            self.busy = False
            try:
                self._show()
            finally:
                self._shown.set()

    def _free_name(self, params: RunParams) -> tuple[RunParams, str]:
        """Return the parameters with a name that no run has."""
        name = free_name(runs_folder(params.launch), params.launch.name)
        return params.change(**{"launch.name": name}), f"This one is {name}."
