"""OwnRow: a field that names a person's own code, with a button that runs it and says what is there."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as w

from ...params import RunParams
from ...params.own import own_fields
from .cell import import_lock
from .fields import FieldRow
from .markup import note
from .worker import Worker


class OwnRow(Worker, FieldRow):
    """A row of the form for an import path. Nothing is imported before its button is pressed."""

    def __init__(
        self, name: str, params: RunParams, *, changed: Callable[[], None], allow: Callable[[RunParams], None]
    ):
        """allow: called with the parameters whose own code the person has asked to run."""
        super().__init__(name, params, changed=changed)
        self._allow = allow
        self.button = w.Button(
            description="Try", icon="play", tooltip=f"Import and call {name}, and show what it gives"
        )
        self.button.on_click(lambda _: self.try_now())
        self.found = self.error_line = w.HTML()
        self.children = [self.input, self.words, self.button, self.found]
        self.show(params)

    def show(self, params: RunParams) -> None:
        """Show the field's value; what was found of another one goes."""
        super().show(params)
        self._params = params
        if hasattr(self, "button"):
            self.button.disabled = self.name not in [name for name, _ in own_fields(params)]
            self.button.layout.display = "none" if self.button.disabled and self.choices else None
            if self.input.value != getattr(self, "_tried", ""):
                self.drop("try")
                self.found.value = ""

    def try_now(self) -> None:
        """Press the button: run the own code of the last valid choices, in a thread."""
        if not self.busy:
            params = self._params
            self._tried = self.input.value
            self.found.value = note("trying…", role="status")
            self._allow(params)
            self.work("try", lambda: self._try(params), show=self._show_found)

    def wait(self) -> str:
        """Wait until what the button started has ended, and return the HTML that it shows."""
        self.wait_for_work()
        return self.found.value

    def _try(self, params: RunParams) -> list[str]:
        with import_lock:
            from ..train.try_own import try_own
        return list(try_own(params, self.name))

    def _show_found(self, lines: list[str]) -> None:
        self.found.value = "".join(note(line, role="status") for line in lines)
