"""Buttons of a run: each says what it did."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ipywidgets as w

from ..checkpoint.steps import complete_checkpoints
from ..run.launch import Run
from ..run.record import RunState, Status
from .markup import note
from .report import write_report

BUTTONS = {
    "Cancel": ("stop", "Stop every rank of this run"),
    "Resume": ("play", "Continue from the newest checkpoint"),
    "Drill": ("life-ring", "Preempt the ranks as a cluster would: they save, exit and start again"),
    "Report": ("file-text", "Write report.html into the folder of the run"),
}
"""Icon and help by label."""


class Actions(w.VBox):
    """Cancel, Resume, Drill, Report. None of them blocks the kernel."""

    def __init__(self, run: Run, *, resumed: Callable[[], None]) -> None:
        """resumed: called when the run goes on."""
        self._run, self._resumed = run, resumed
        self._busy = ""  # label of the action that is under way
        self.buttons: dict[str, w.Button] = {}
        for label, (icon, about) in BUTTONS.items():
            button = w.Button(description=label, icon=icon, tooltip=about, layout=w.Layout(width="9em"))
            button.on_click(lambda button: self._start(button.description))
            self.buttons[label] = button
        self._note = w.HTML()
        row = w.HBox(list(self.buttons.values()), layout=w.Layout(flex_flow="row wrap"))
        super().__init__([row, self._note])

    def update(self, state: RunState) -> None:
        """Enable what can be done in this state."""
        possible = {
            "Cancel": not state.done,
            "Resume": state.done and not state.ok,
            "Drill": state.status is Status.RUNNING,
            "Report": True,
        }
        for label, button in self.buttons.items():
            button.disabled = bool(self._busy) or not possible[label]

    def say(self, message: str, *, error: bool = False) -> None:
        """Show a message below the buttons."""
        self._note.value = note(message, "error" if error else "quiet", role="status")

    def _start(self, label: str) -> None:
        if not self._busy:
            self._busy = label
            self.say(f"{label}…")
            threading.Thread(target=self._act, args=(label,), daemon=True, name=label).start()

    def _act(self, label: str) -> None:
        """Do what a button says, in a thread."""
        try:
            if label == "Cancel":
                self.say(f"cancelled: {self._run.cancel()}")
            elif label == "Resume":
                checkpoints = complete_checkpoints(self._run.path / "checkpoints")
                self._run.resume()
                self._resumed()
                self.say(f"resumed from {checkpoints[-1].name if checkpoints else 'the first step'}")
            elif label == "Drill":
                self._run.drill()
                self.say("preemption signal sent; the events below the curves follow")
            else:
                self.say(f"written: {write_report(self._run.path)}")
        except Exception as error:  # the thread ends here, and the person who pressed the button wants to know
            self.say(f"{label}: {error or type(error).__name__}", error=True)
        finally:
            self._busy = ""
            self.update(self._run.state())
