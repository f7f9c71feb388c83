"""Launcher: the Launch button of a form, and below it the run that it started."""

from __future__ import annotations

import threading

import ipywidgets as w

from ..params import RunParams
from ..run.interrupt import interruptible
from ..run.launch import launch
from ..run.placement import trains_on
from ..run.record import RunState
from .cell import CellWidget, import_lock
from .form import RunForm
from .markup import error_note, note
from .panel import RunPanel


class Launcher(CellWidget):
    """Starts runs with the choices of a form. Nothing here blocks the kernel.

    panel is the RunPanel of the newest run, None before there is one.
    """

    def __init__(self, form: RunForm):
        self.panel: RunPanel | None = None
        self._launched: RunParams | None = None
        self._failure: Exception | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._button = w.Button(description="Launch", icon="play", button_style="primary")
        self._button.on_click(lambda _: self._start())
        self._note, self._below = w.HTML(), w.VBox()
        super().__init__([self._button, self._note, self._below])
        self._follow(form)

    def launch(self) -> None:
        """Press the button, and return immediately. A run that goes on, or has completed, is not launched again."""
        failed = self.panel is not None and self.panel.state.done and not self.panel.state.ok
        if self._launched != self._form.params or failed:
            self._start()

    def wait(self) -> RunState:
        """Wait until the newest run is over. Raises the error that kept it from starting.

        Interrupting the cell ends the waiting, not the run.
        """
        assert self._launched or self._failure, "nothing was launched; call launch() first"
        with interruptible("the launch goes on"):
            self._idle.wait()  # not Thread.join: interrupted, Python 3.11 takes the thread for ended
        if self._failure:
            raise self._failure
        assert self.panel is not None
        return self.panel.wait()

    def _follow(self, form: RunForm) -> None:
        """Launch the choices of this form, and of the one that replaces it."""
        self._form = form
        form.observe(lambda _: self._update_button(), "error")
        form.observe(lambda change: self._follow(change.new), "successor")
        self._update_button()

    def _update_button(self) -> None:
        self._button.disabled = not self._idle.is_set() or self._form.error is not None

    def _start(self) -> None:
        if not self._idle.is_set():
            return
        if self._form.error:
            raise self._form.error
        self._launched, self._failure = self._form.params, None
        self._form.allow(self._form.params)
        self._idle.clear()
        self._update_button()
        threading.Thread(target=self._launch, args=(self._form.params,), daemon=True, name="launch").start()

    def _launch(self, params: RunParams) -> None:
        """Check and launch, in a thread."""
        try:
            self._note.value = note("starting…", role="status")
            with import_lock:
                from ..train.prepare import prepare
            prepared = prepare(params)  # its errors are shown here, before a rank starts
            self.panel = RunPanel(launch(prepared).path)
            self._below.children, self._note.value = [self.panel], note(trains_on(params))
        except Exception as error:  # the thread ends here: the error is shown, and wait() raises it
            self._failure, self._launched = error, None
            self._note.value = error_note(error)
        finally:
            self._idle.set()
            self._update_button()
