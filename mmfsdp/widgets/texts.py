"""The other ways to write a form's parameters down: YAML, the command line, the batch file. Each can be edited."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as w

from ..params import ParamError, RunParams
from .style import note as html

Reader = Callable[[str], tuple[RunParams, str | None]]
"""From a text to parameters and the file or preset it names. Raises ParamError."""


class TextTab(w.VBox):
    """A text that follows the parameters, and that they follow once its box, `area`, is left or Apply is pressed."""

    def __init__(self, label: str, about: str, *, read: Reader, changed: Callable[[TextTab], None], rows: int):
        self._read, self._quiet = read, False
        self.area = w.Textarea(description=label, rows=rows, continuous_update=False)
        self.area.observe(lambda _: None if self._quiet else changed(self), "value")
        self._note = w.HTML()
        self._apply = w.Button(description="Apply", tooltip="Take this text over into the form")
        self._apply.on_click(lambda _: changed(self))  # leaving the box has done it already, but who knows that
        super().__init__([w.HTML(f'<div class="mm-quiet">{about}</div>'), self.area, self._apply, self._note])
        self.add_class("mm-text")
        self.error: ParamError | None = None

    def read(self) -> tuple[RunParams, str | None]:
        """What the text says. Raises ParamError."""
        return self._read(self.area.value)

    def write(self, text: str, *, locked: str | None = None) -> None:
        """Show a text; locked: why it cannot be edited now."""
        self._quiet, self.area.value, self.area.disabled = True, text, locked is not None
        self._quiet = False
        self.area.layout.display = None if text else "none"
        self._apply.layout.display = "none" if locked else None
        self.say(None, locked)

    def say(self, error: ParamError | None, note: str | None = None) -> None:
        """Show what is wrong with the text."""
        self.error = error
        self._note.value = html(error, "error", role="alert") if error else html(note) if note else ""
