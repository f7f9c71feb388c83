"""Launcher: the Launch button of a form, and under it the run that it started."""

from __future__ import annotations

import threading
from html import escape

import ipywidgets as w

from ..launch import launch
from ..launch.start import check
from ..params import RunParams
from ..runs import RunState
from .form import RunForm
from .heavy import alone, planned
from .panel import RunPanel
from .style import Whole, note


class Launcher(Whole):
    """Starts runs with the choices of a form. Nothing here blocks the kernel.

    panel is the RunPanel of the newest run, None before there is one.
    """

    def __init__(self, form: RunForm):
        self.panel: RunPanel | None = None
        self._launched: RunParams | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._failure: Exception | None = None
        self._button = w.Button(description="Launch", icon="play", button_style="primary")
        self._button.on_click(lambda _: self._start())
        self._note, self._place = w.HTML(), w.VBox()
        self._bar = w.FloatProgress(min=0, max=1, layout=w.Layout(width="100%", display="none"))
        super().__init__([self._button, self._note, self._bar, self._place])
        self._adopt(form)

    def launch(self) -> None:
        """What the button does, and returns at once. What runs already, or has run well, is not launched again."""
        failed = self.panel is not None and self.panel.state.done and not self.panel.state.ok
        if self._launched != self._form.params or failed:
            self._start()

    def wait(self) -> RunState:
        """Wait until the newest run is over. Raises what kept it from starting. Interrupting ends only the waiting."""
        assert self._launched or self._failure, "nothing was launched; call launch() first"
        self._idle.wait()  # not a join: see RunPanel.wait
        if self._failure:
            raise self._failure
        assert self.panel is not None
        return self.panel.wait()

    def _adopt(self, form: RunForm) -> None:
        """Follow a form, or the one that has taken its place."""
        self._form = form
        form.observe(lambda _: self._enable(), "error")
        form.observe(lambda change: self._adopt(change.new), "successor")
        self._enable()

    def _busy(self) -> bool:
        return not self._idle.is_set()

    def _enable(self) -> None:
        self._button.disabled = self._busy() or self._form.error is not None

    def _start(self) -> None:
        if self._busy():
            return
        if self._form.error:
            raise self._form.error
        self._launched, self._failure = self._form.params, None
        self._idle.clear()
        threading.Thread(target=self._work, args=(self._form.params,), daemon=True, name="launch").start()
        self._enable()

    def _work(self, params: RunParams) -> None:
        try:
            self._note.value = "starting…"
            check(params)
            next(planned(params))[0].check()  # what the lint calls an error stops here, not in a rank
            with alone():
                from ..pretrain import ensure_backbones
            ensure_backbones(params, progress=self._progress)
            self.panel = RunPanel(launch(params).path)
            self._place.children, self._note.value = [self.panel], ""
        except Exception as error:  # nobody is above this thread: it is shown, and raised by wait()
            self._failure, self._launched = error, None
            self._note.value = note(str(error) or type(error).__name__, "error", role="alert")
        finally:
            self._idle.set()
            self._bar.layout.display = "none"
            self._button.disabled = self._form.error is not None

    def _progress(self, label: str, done: float) -> None:
        self._note.value, self._bar.value = f"first time only: {escape(label)}", done
        self._bar.layout.display = None
