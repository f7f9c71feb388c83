"""CheckButton: `mmfsdp check` with the choices of a form, in a thread; its lines appear as they are found."""

from __future__ import annotations

import threading

import ipywidgets as w

from ...params import RunParams
from ..check.check import WAIT_MIN, Line, SiteCheck
from ..check.site_report import SiteReport
from ..run.interrupt import Interrupted
from ..run.launchers.registry import launcher_named
from .form import RunForm
from .markup import error_note, note
from .worker import Worker

TIP = "Folders, versions, the hub, and ranks that talk to each other: a line each, with what to do"
STOP = "End the check"


class CheckButton(Worker, w.VBox):
    """A button that checks the machine, or with executor slurm the cluster; a table of what is found beneath."""

    def __init__(self, form: RunForm):
        self._form = form
        self._stopped = threading.Event()
        self.report: SiteReport | None = None
        """The result of the newest check, once it is done."""
        self._found: list[tuple[str, Line]] = []
        self.button = w.Button(icon="stethoscope", tooltip=TIP, layout=w.Layout(width="auto", align_self="flex-start"))
        self.button.on_click(lambda _: self.press())
        self.result = w.HTML()
        super().__init__([self.button, self.result])
        self.add_class("mm-check")
        self.update()

    def update(self) -> None:
        """Say on the button what a press does now."""
        place = launcher_named(self._form.params.launch.executor).checks
        self.button.description = STOP if self.busy else f"Check {place}"
        self.button.disabled = self._form.error is not None and not self.busy

    def press(self) -> None:
        """Begin a check, or end the one that goes on. Returns immediately."""
        if self.busy:
            self._stopped.set()
            return
        self._found = []
        self._stopped.clear()
        self._draw("looking at this machine")
        params = self._form.params
        self.work("check", lambda: self._check(params), show=self._show_result)

    def show_error(self, name: str, error: Exception) -> None:
        """Show what ended the check, below the lines so far."""
        self.result.value = self._table() + error_note(error)

    def busy_changed(self) -> None:
        """Say on the button what a press does now."""
        self.update()

    def _check(self, params: RunParams) -> str:
        """Check, in a thread, and return what is found as HTML."""
        try:
            self._form.check_launcher_allowed(params)
            site = SiteCheck(params, self._show, self._draw, 60 * WAIT_MIN, is_stopped=self._is_stopped)
            self.report = site.report()
        except Interrupted as interrupt:
            return self._table() + note(f"ended: {interrupt}", role="status")
        return self.report._repr_html_()

    def _is_stopped(self) -> bool:
        return self._stopped.is_set() or not self.is_wanted

    def _show_result(self, html: str) -> None:
        self.result.value = html

    def _show(self, place: str, line: Line) -> None:
        """Show one more line."""
        self._found.append((place, line))
        self._draw("checking")

    def _draw(self, words: str) -> None:
        """Show the lines that are there, and what the check does now."""
        self.result.value = self._table() + note(f"{words}…", role="status")
        self.update()

    def _table(self) -> str:
        """Return the lines so far as a table."""
        places, lines = [place for place, _ in self._found], [line for _, line in self._found]
        return SiteReport(lines=tuple(lines), places=tuple(places)).table() if lines else ""
