"""What can be done with a run by a button. Each says what it did, or why it cannot be done now."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as w

from .. import runs
from ..launch import Run
from .heavy import alone
from .style import note


class Actions(w.VBox):
    """Cancel, Resume, Drill, Open report, Load model. None of them blocks the kernel.

    model and processor are the loaded ones, None before.
    """

    def __init__(self, run: Run, *, again: Callable[[], None]) -> None:
        """again: called when the run goes on."""
        self.model: Any = None
        self.processor: Any = None
        self._run, self._again, self._busy = run, again, ""
        self._state: runs.RunState | None = None
        parts: dict[str, tuple[str, Callable[[], str], str]] = {
            "Cancel": ("stop", self._cancel, "Stop every rank of this run"),
            "Resume": ("play", self._resume, "Go on from the newest checkpoint"),
            "Drill": ("life-ring", self._drill, "Have the ranks save, end and start again, as after a preemption"),
            "Open report": ("file-text", self._report, "Write report.html and show it below; again: close it"),
            "Load model": ("eye", self._load, "Load the newest checkpoint into this kernel, and ask it about pictures"),
        }
        self._help = {name: words for name, (_, _, words) in parts.items()}
        self.buttons = {
            name: w.Button(description=name, icon=icon, tooltip=words, layout=w.Layout(width="9em"))
            for name, (icon, _, words) in parts.items()
        }
        for name, (_, act, _) in parts.items():
            self.buttons[name].on_click(lambda _, name=name, act=act: self._start(name, act))
        self._note, self._page, self._below = w.HTML(), w.HTML(), w.VBox()
        row = w.HBox(list(self.buttons.values()), layout=w.Layout(flex_flow="row wrap"))
        super().__init__([row, self._note, self._page, self._below])

    def show(self, state: runs.RunState) -> None:
        """Enable what can be done in this state; the others say why not."""
        self._state = state
        newest = runs.complete_checkpoints(self._run.path / "checkpoints")[-1:]
        why = {
            "Cancel": "the run has ended" if state.done else "",
            "Resume": "" if state.done and not state.ok else "all steps are done" if state.done else "it still runs",
            "Drill": "" if state.status is runs.Status.RUNNING else "only a run that does steps can be drilled",
            "Load model": "" if newest else "there is no complete checkpoint yet",
        }
        for name, button in self.buttons.items():
            reason = f"{self._busy} is under way" if self._busy else why.get(name, "")
            button.disabled = bool(reason)
            button.tooltip = f"not now: {reason}" if reason else self._help[name]

    def say(self, words: str, *, bad: bool = False) -> None:
        """Show words below the buttons."""
        self._note.value = note(words, "error" if bad else "quiet", role="status")

    def _start(self, name: str, act: Callable[[], str]) -> None:
        if not self._busy:
            self._busy = name
            self.say(f"{name}…")
            threading.Thread(target=self._do, args=(name, act), daemon=True, name=name).start()

    def _do(self, name: str, act: Callable[[], str]) -> None:
        try:
            self.say(act())
        except Exception as error:  # nobody is above this thread, and the person who pressed the button wants to know
            self.say(f"{name}: {error or type(error).__name__}", bad=True)
        finally:
            self._busy = ""
            self.show(self._run.state())

    def _cancel(self) -> str:
        return f"cancelled: {self._run.cancel()}"

    def _resume(self) -> str:
        self._run.resume()
        self._again()
        newest = runs.complete_checkpoints(self._run.path / "checkpoints")[-1:]
        return f"resumed from {newest[0].name if newest else 'the beginning, since there is no checkpoint'}"

    def _drill(self) -> str:
        self._run.drill()
        return "asked to save and to start again; the events below the curves will tell"

    def _report(self) -> str:
        from ..report import write_report

        if self._page.value:
            self._page.value = ""
            return "report closed"
        path = write_report(self._run.path)
        self._page.value = framed(path)
        return f"written: {path}"

    def _load(self) -> str:
        with alone():
            from .captioner import Captioner
        captioner = Captioner(self._run.path).wait()
        self.model, self.processor = captioner.model, captioner.processor
        self._below.children = [captioner]
        return f"loaded {captioner.checkpoint}; ask it below. actions.model of this panel is the model"


def framed(page: Path) -> str:
    """A self-contained page as part of this one, which it cannot touch, and a link to keep it."""
    text = page.read_text(encoding="utf-8")
    data = base64.b64encode(text.encode()).decode()
    name = escape(f"{page.parent.name}-{page.name}")
    return (
        f'<a download="{name}" href="data:text/html;base64,{data}">save the page</a>'
        f'<iframe sandbox title="{escape(page.name)}" srcdoc="{escape(text)}" '
        'style="width:100%;height:36em;border:1px solid #78787866"></iframe>'
    )
