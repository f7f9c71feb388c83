"""Buttons of a run: each says what it did."""

from __future__ import annotations

import threading

import ipywidgets as w

from ..run.handle import Run
from ..run.record import RunState, Status
from .markup import note
from .report import write_report


class Actions(w.VBox):
    """Cancel, Drill (preempt the ranks as a cluster would) and Report. None of them blocks the kernel."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._busy = False  # an action is under way
        self.buttons: dict[str, w.Button] = {}
        for label, icon in (("Cancel", "stop"), ("Drill", "life-ring"), ("Report", "file-text")):
            button = w.Button(description=label, icon=icon)
            button.on_click(lambda button: self._start(button.description))
            self.buttons[label] = button
        self._note = w.HTML()
        super().__init__([w.HBox(list(self.buttons.values())), self._note])

    def update(self, state: RunState) -> None:
        """Enable what can be done in this state."""
        self.buttons["Cancel"].disabled = self._busy or state.done
        self.buttons["Drill"].disabled = self._busy or state.status is not Status.RUNNING or bool(state.replay_of)
        self.buttons["Report"].disabled = self._busy

    def say(self, message: str, *, error: bool = False) -> None:
        """Show a message below the buttons."""
        self._note.value = note(message, "error" if error else "quiet", role="status")

    def _start(self, label: str) -> None:
        if not self._busy:
            self._busy = True
            self.say(f"{label}…")
            threading.Thread(target=self._act, args=(label,), daemon=True, name=label).start()

    def _act(self, label: str) -> None:
        """Do what a button says, in a thread."""
        try:
            if label == "Cancel":
                self.say(f"cancelled: {self._run.cancel()}")
            elif label == "Drill":
                self._run.drill()
                self.say("preemption signal sent; the events below the charts follow")
            else:
                self.say(f"written: {write_report(self._run.path)}")
        except Exception as error:  # the thread ends here, and the person who pressed the button wants to know
            self.say(f"{label}: {error or type(error).__name__}", error=True)
        finally:
            self._busy = False
            self.update(self._run.state())
