"""OwnRow: a field that names a person's own code, with a button that runs it and says what is there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ipywidgets as w

from ..params import RunParams
from ..params.own import own_fields
from .cell import import_lock
from .fields import FieldRow
from .markup import error_note, note


class OwnRow(FieldRow):
    """A row of the form for an import path. Nothing is imported before its button is pressed."""

    def __init__(
        self, name: str, params: RunParams, *, changed: Callable[[], None], allow: Callable[[RunParams], None]
    ):
        """allow: called with the parameters whose own code the person has asked to run."""
        super().__init__(name, params, changed=changed)
        self._allow = allow
        self._thread: threading.Thread | None = None
        self.button = w.Button(
            description="Try", icon="play", tooltip=f"Import and call {name}, and show what it gives"
        )
        self.button.on_click(lambda _: self.try_now())
        self.found = w.HTML()
        self.children = [self._input, self._words, self.button, self.found]
        self.show(params)

    def show(self, params: RunParams) -> None:
        """Show the field's value; what was found of another one goes."""
        super().show(params)
        self._params = params
        if hasattr(self, "button"):
            self.button.disabled = self.name not in [name for name, _ in own_fields(params)]
            if self._input.value != getattr(self, "_tried", ""):
                self.found.value = ""

    def try_now(self) -> None:
        """Press the button: run the own code of the last valid choices, in a thread."""
        if self._thread is None:
            self._tried = self._input.value
            self.found.value = note("trying…", role="status")
            self._allow(self._params)
            self._thread = threading.Thread(
                target=self._try, args=(self._params,), daemon=True, name=f"try {self.name}"
            )
            self._thread.start()

    def wait(self) -> str:
        """Wait until what the button started has ended, and return the HTML that it shows."""
        thread = self._thread
        if thread is not None:
            thread.join()
        return self.found.value

    def _try(self, params: RunParams) -> None:
        try:
            with import_lock:
                from ..train.try_own import try_own
            self.found.value = "".join(note(line, role="status") for line in try_own(params, self.name))
        except Exception as error:  # the thread ends here: the error is shown
            self.found.value = error_note(error)
        finally:
            self._thread = None
