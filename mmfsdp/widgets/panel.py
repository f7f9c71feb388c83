"""RunPanel: a run as it goes, drawn from its folder. Closing the panel, the browser or the kernel leaves the run be."""

from __future__ import annotations

import threading
import time
from collections import deque
from html import escape
from pathlib import Path

import ipywidgets as w

from .. import runs
from ..launch import Run
from ..plots import History, charts
from ..style import STYLE
from ..watch import LogLine, Progress, Tail, clock

LINES = 300
"""Newest log lines that are shown; older ones are in the run folder."""
CHUNK = 8 << 20
"""Bytes of metrics that are read at once."""
PAUSE = 0.5
"""Seconds between two looks at the folder, so at most two updates a second reach the browser."""
REDRAW = 1.0
"""Seconds between two drawings of the curve, which is the costly part."""
COLORS = {
    runs.Status.FAILED: "danger",
    runs.Status.LOST: "danger",
    runs.Status.CANCELLED: "warning",
    runs.Status.COMPLETED: "success",
}


class RunPanel(w.VBox):
    """State, progress, loss and the newest log lines of all ranks of a run, kept up to date by a thread until it ends.

    Cheap to make again: `RunPanel("runs/first")` shows all there is, after a page reload or a kernel restart too.
    Raises ValueError where there is no such run.
    """

    _newest: dict[Path, RunPanel] = {}

    def __init__(self, path: str | Path):
        self._closing = threading.Event()
        self.run = Run.open(path)
        self.state = self.run.state()
        self._lines: deque[LogLine] = deque(maxlen=LINES)
        self._history, self._progress = History(), Progress(self.run.path)
        self._redraw = 0.0
        self._head, self._curve, self._log = w.HTML(), w.HTML(), w.HTML()
        self._bar = w.IntProgress(min=0, max=max(1, self.state.steps), layout=w.Layout(width="100%", height="12px"))
        self._cancel = w.Button(description="Cancel", icon="stop", tooltip="Stop every rank of this run")
        self._cancel.on_click(lambda _: threading.Thread(target=self.run.cancel, daemon=True).start())
        top = w.HBox([self._head, self._cancel], layout=w.Layout(justify_content="space-between"))
        # a box that is laid out from its bottom keeps the newest line in view
        look = {"max_height": "20em", "overflow": "auto", "flex_flow": "column-reverse", "flex": "0 0 auto"}
        log = w.Box([self._log], layout=w.Layout(**look, border="1px solid #78787866", padding="4px 8px"))
        super().__init__([w.HTML(STYLE), top, self._bar, self._curve, log])
        self.add_class("mm-widget")
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"watch {self.run.path}")
        self._replace_older()
        self._thread.start()

    def wait(self, timeout: float | None = None) -> runs.RunState:
        """Wait until the run is over and all is drawn, or `timeout` seconds; the state it has then.

        Interrupting the cell ends the waiting, not the run.
        """
        self._thread.join(timeout)
        return self.state

    def close(self) -> None:
        """Stop drawing. The run goes on."""
        self._closing.set()
        super().close()

    def _replace_older(self) -> None:
        """One panel a run is enough: the older one, whose cell was run again, stops its thread."""
        older = self._newest.get(self.run.path)
        if older is not None:
            older._closing.set()
        self._newest[self.run.path] = self

    def _watch(self) -> None:
        tail, offset = Tail(self.run.path), 0
        while True:
            state = self.run.state()  # before the files: what is read after the end is all there is
            lines = tail.poll(last=state.done)
            before = offset
            rows, offset = runs.read_metrics(self.run.path, offset=before, limit=CHUNK)
            self._lines.extend(lines)
            self._history.add(rows)
            self._progress.recent.extend(rows)
            if rows or str(state) != str(self.state) or not self._head.value:
                self.state = state
                self._draw_state()
            if lines:
                self._draw_log()
            behind = offset - before > CHUNK // 2
            if not behind and (state.done or self._closing.wait(PAUSE)):
                return

    def _draw_state(self) -> None:
        state, left = self.state, self._progress.seconds_left(self.state)
        words = f"<b>{escape(self.run.name)}</b> {escape(str(state))}"
        if left and not state.done:
            words += f', <span class="mm-quiet">{clock(left)} left</span>'
        if state.traceback:
            words += f'<pre class="mm-error mm-scroll">{escape(state.traceback)}</pre>'
        self._head.value = words
        self._bar.max, self._bar.value = max(1, state.steps), state.step
        self._bar.bar_style = COLORS.get(state.status, "info")
        self._cancel.disabled = state.done
        if self._history and (state.done or time.monotonic() > self._redraw):
            self._redraw = time.monotonic() + REDRAW
            self._curve.value = charts(self._history, total=state.steps)

    def _draw_log(self) -> None:
        rows = [f'<span class="mm-quiet">{line.rank} │</span> {_colored(line.text)}' for line in self._lines]
        self._log.value = '<pre class="mm-log">' + "\n".join(rows) + "</pre>"


def _colored(text: str) -> str:
    """A log line as HTML: its colors kept, everything else escaped."""
    if "\x1b" not in text:
        return escape(text)
    from nbconvert.filters.ansi import ansi2html  # slow to import, and seldom needed

    return ansi2html(text)
