"""Buttons of a run: each says what it did."""

from __future__ import annotations

import ipywidgets as w

from ..run.files.run_record import RunState, Status
from ..run.handle import Run
from .markup import note
from .report import write_report
from .worker import Worker

PREEMPT = "Preempt"
TIPS = {
    "Cancel": "End the run; its newest checkpoint stays",
    PREEMPT: "Take the ranks away, as a cluster would for another job: they save, end and start again",
    "Report": "Write report.html into the folder of the run",
}


class Actions(Worker, w.VBox):
    """Cancel, Preempt (as a cluster would) and Report. None of them blocks the kernel."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.buttons: dict[str, w.Button] = {}
        for label, icon in (("Cancel", "stop"), (PREEMPT, "eject"), ("Report", "file-text")):
            button = w.Button(description=label, icon=icon, tooltip=TIPS[label])
            button.on_click(lambda button: self._start(button.description))
            self.buttons[label] = button
        self.note = w.HTML()
        super().__init__([w.HBox(list(self.buttons.values())), self.note])

    def update(self, state: RunState) -> None:
        """Enable what can be done in this state."""
        self.buttons["Cancel"].disabled = self.busy or state.done
        self.buttons[PREEMPT].disabled = self.busy or state.status is not Status.RUNNING or bool(state.replay_of)
        self.buttons["Report"].disabled = self.busy

    def say(self, message: str, *, error: bool = False) -> None:
        """Show a message below the buttons."""
        self.note.value = note(message, "error" if error else "quiet", role="status")

    def show_error(self, name: str, error: Exception) -> None:
        """Say what kept a button from doing what it says."""
        self.say(f"{name}: {error or type(error).__name__}", error=True)

    def busy_changed(self) -> None:
        """Disable the buttons while one does what it says."""
        if self.busy:
            for button in self.buttons.values():
                button.disabled = True
        else:
            self.update(self._run.state())

    def _start(self, label: str) -> None:
        if not self.busy:
            self.say(f"{label}…")
            self.work(label, lambda: self._act(label), show=self.say)

    def _act(self, label: str) -> str:
        """Do what a button says, and return what was done."""
        if label == "Cancel":
            return f"cancelled: {self._run.cancel()}"
        if label == PREEMPT:
            self._run.drill()
            return "preemption signal sent; the events below the charts follow"
        return f"written: {write_report(self._run.path)}"
