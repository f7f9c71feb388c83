"""Buttons of a run: each says what it did."""

from __future__ import annotations

import ipywidgets as w

from ..run.files.run_record import RunState, Status
from ..run.handle import Run
from ..run.kill_rank import kill_rank
from .markup import note
from .report import write_report
from .worker import Worker

PREEMPT, KILL = "Preempt", "Kill rank"
TIPS = {
    "Cancel": "End the run; its newest checkpoint stays",
    PREEMPT: "Take the ranks away, as a cluster would for another job: they save, end and start again",
    KILL: "End the process of one rank, as for lack of memory: the run fails, and can be resumed from its checkpoint",
    "Report": "Write report.html into the folder of the run",
}


class Actions(Worker, w.VBox):
    """Cancel, Preempt (as a cluster would), Kill rank 1 and Report. None of them blocks the kernel."""

    def __init__(self, run: Run) -> None:
        self._run = run
        record = run.record
        self._killed = min(1, record.ranks - 1) if record else 0
        self.buttons: dict[str, w.Button] = {}
        for label, icon in (("Cancel", "stop"), (PREEMPT, "eject"), (KILL, "bolt"), ("Report", "file-text")):
            words = f"{KILL} {self._killed}" if label == KILL else label
            button = w.Button(description=words, icon=icon, tooltip=TIPS[label])
            button.on_click(lambda _, label=label: self._start(label))
            self.buttons[label] = button
        self.note = w.HTML()
        super().__init__([w.HBox(list(self.buttons.values())), self.note])

    def update(self, state: RunState) -> None:
        """Enable what can be done in this state."""
        self.buttons["Cancel"].disabled = self.busy or state.done
        for label in (PREEMPT, KILL):
            self.buttons[label].disabled = self.busy or state.status is not Status.RUNNING or bool(state.replay_of)
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
            self.say(f"{self.buttons[label].description}…")
            self.work(label, lambda: self._act(label), show=self.say)

    def _act(self, label: str) -> str:
        """Do what a button says, and return what was done."""
        if label == "Cancel":
            return f"cancelled: {self._run.cancel()}"
        if label == PREEMPT:
            self._run.drill()
            return "preemption signal sent; the events below the charts follow"
        if label == KILL:
            kill_rank(self._run.path, self._killed)
            return f"rank {self._killed} was killed; the run fails, and Resume goes on from its newest checkpoint"
        return f"written: {write_report(self._run.path)}"
