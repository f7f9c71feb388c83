"""RunPanel: a run as it goes, drawn from its folder. Closing the panel or the kernel leaves the run alone."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

import ipywidgets as w
import traitlets

from ...params.in_words import size
from ..run.files.folder import read_result
from ..run.files.plan_file import read_plan
from ..run.files.run_record import RunState, Status
from ..run.files.snapshot import Snapshot
from ..run.handle import Run
from ..run.interrupt import interruptible
from ..run.progress import PartProgress, part_of
from ..run.state import read_ranks, run_state
from ..run.trouble import FAILED, Trouble, headline, is_ending, troubles
from ..run.watch import LogReader, Progress, clock
from .actions import Actions
from .banner import banner, tracebacks
from .cell import CellWidget, ViewerPresence
from .charts.charts import Charts
from .learning import LearningStrip, hidden_sliders
from .log_view import LogView
from .markup import note, shown
from .pictures.rank_grid import rank_grid
from .report import newest_events
from .worker import Worker

WATCHED_UPDATE_S = 0.5
UNWATCHED_UPDATE_S = 30.0
"""Seconds between two updates of a page that somebody watches, and of one that nobody does."""
DETAILS_CPU_SHARE = 0.02
"""Ranks and facts are drawn once a second, or more rarely where drawing would take more of a core than this."""
MAX_LOG_BYTES = 1 << 20
"""Bytes of log that one update reads; of more, only the newest."""

DONE, NOW, TO_COME = "✓", "●", "○"
"""Signs of the parts of a run, in addition to the weight of the text."""


class RunPanel(Worker, CellWidget):
    """State, progress, ranks, curves and log of a run, updated by a thread until the run ends; and its buttons.

    `RunPanel("runs/first")` can be made again at any time, after a page reload or a kernel restart, too. Raises
    ValueError where there is no such run.
    """

    status = traitlets.Unicode()
    """The status of the run that is shown."""

    def __init__(self, path: str | Path):
        self.run = Run.open(path)
        self.state = self.run.state()
        record = self.run.record
        self._ranks = record.ranks if record else 0
        self._tail = LogReader(self.run.path, limit=MAX_LOG_BYTES)
        self._progress = Progress(self.run.path)
        self._viewer = ViewerPresence()
        self._details_due = 0.0  # monotonic time of the next drawing of ranks and facts
        self._troubles: list[Trouble] = []
        self.head, self._parts, self.banner = w.HTML(), w.HTML(), w.HTML()
        self._rank_grid, self._tracebacks, self._facts = w.HTML(), w.HTML(), w.HTML()
        self.charts = Charts(self.run.path, total=record.steps if record else None, height=86, compact=True)
        self.actions, self.logs = Actions(self.run), LogView(self._ranks)
        facts = w.VBox([self._parts, self._rank_grid, self._facts])
        facts.add_class("mm-run-facts")
        self.learning, self._learned = w.HTML(), LearningStrip(self.run.path)
        strip = w.Box([facts, self.charts, self.logs, self.learning])
        strip.add_class("mm-strip")
        self.top = w.Box([self.head, self.actions])
        self.top.add_class("mm-run-head")
        super().__init__([self.top, self.banner, strip, self._tracebacks, hidden_sliders()])
        self.add_class("mm-run")
        self.replace_older()
        self.work("watch", self._watch)

    def wait(self, timeout: float | None = None) -> RunState:
        """Return the state of the run once it is over and all is drawn, or after `timeout` seconds.

        Interrupting the cell ends the waiting, not the run.
        """
        with interruptible(f"the run {self.run.name} goes on; Cancel ends it"):
            self.wait_for_work(timeout)
        return self.state

    def close(self) -> None:
        """Stop drawing and remove the panel. The run goes on."""
        self.end_work()
        self._viewer.returned.set()
        self._viewer.close()
        super().close()

    def show_error(self, name: str, error: Exception) -> None:
        """Say why the panel stands still, and raise the error, whose traceback Jupyter shows."""
        self.actions.say(f"this panel stopped: {error or type(error).__name__}; make it again", error=True)
        raise error

    def _watch(self) -> None:
        """Read and draw until the run ends or the panel is closed."""
        while self.is_wanted:
            try:
                if self._update():
                    break
            except OSError as error:  # passes: a shared disk that does not answer, too many open files
                self.actions.say(f"the run's folder cannot be read now; trying again: {error}", error=True)
            self._viewer.returned.wait(WATCHED_UPDATE_S if self._viewer.watching else UNWATCHED_UPDATE_S)
            self._viewer.returned.clear()

    def _update(self) -> bool:
        """Read what is new and draw it. Return True if the run is over and all of it is drawn."""
        look = Snapshot(self.run.path)
        state = run_state(look)  # before the logs: what is read after the end is all there is
        self._progress.add(look.rows())
        lines = self._tail.poll(last=state.done)
        self.logs.add(lines, left_out=self._tail.left_out, gaps=self._tail.gaps)
        self.state = state
        self._viewer.ask()
        is_told = any(trouble.code == FAILED for trouble in self._troubles)
        has_failed = state.rank is not None and not is_told  # this is told at once
        if state.done or has_failed or time.monotonic() >= self._details_due:
            cpu_start = time.thread_time()
            self._draw_details(look)
            cpu_s = time.thread_time() - cpu_start
            self._details_due = time.monotonic() + max(1.0, cpu_s / DETAILS_CPU_SHARE)
        html = f"<span><b>{shown(self.run.name)}</b> {escape(headline(state, self._troubles))}"
        seconds_left = self._progress.seconds_left(state)
        if seconds_left and not is_ending(state, self._troubles):
            html += f', <span class="mm-quiet">{clock(seconds_left)} left</span>'
        html += "</span>"
        if state.status is not Status.PREPARING:  # which has a bar of its own
            html += f'<progress aria-label="steps done" value="{state.step}" max="{max(1, state.steps)}"></progress>'
        self.head.value = html
        self.actions.update(state)
        self.logs.draw()
        self.status = str(state.status)
        return state.done

    def _draw_details(self, look: Snapshot) -> None:
        """Draw what is wrong, the rank grid, the tracebacks of failed ranks, what was predicted, and the events."""
        ranks = read_ranks(look, self._ranks, self.state)
        found = self._troubles = troubles(look, self.state, ranks=ranks)
        self.banner.value = banner(found)
        self._parts.value = parts_line(part_of(look, self.state, ranks=ranks))
        self._rank_grid.value = rank_grid(ranks, found)
        self._tracebacks.value = tracebacks(ranks, found)
        result = read_result(self.run.path) if self.state.done else {}
        html = newest_events(self.run.path)
        row = look.last_row()
        planned = read_plan(self.run.path, done=row.get("step", 1) - 1)
        sent, predicted = row.get("wire_bytes"), (planned.get("estimate") or {}).get("wire_bytes")
        if sent is not None and predicted is not None:
            html += note(f"sent in a step: {size(sent)}, predicted {size(predicted)}")
        self._facts.value = html
        self.learning.value = self._learned.html()
        self.charts.ended = self.state.done
        peak = (result.get("peak") or {}).get("bytes")  # known with the result, for the batch that was measured
        self.charts.describe(total=self.state.steps, predicted={"memory_bytes": peak})
        self.charts.draw()


def parts_line(progress: PartProgress | None) -> str:
    """Return the parts of a run as HTML, with a bar where the share that is done is known; empty for None."""
    if progress is None:
        return ""
    now = progress.parts.index(progress.part)
    items = []
    for index, part in enumerate(progress.parts):
        if index == now:
            items.append(f'<b aria-current="step">{NOW} {escape(part)}</b>')
        else:
            items.append(f"<span>{DONE if index < now else TO_COME} {escape(part)}</span>")
    words = escape(progress.words)
    bar = ""
    if progress.share is not None:
        words += f", {progress.share:.0%}"
        if progress.left_s is not None:
            words += f", {clock(progress.left_s)} left"
        bar = f'<progress aria-label="{escape(progress.part)} done" value="{progress.share:.3f}" max="1"></progress>'
    return f'<div class="mm-parts">{"".join(items)}</div><div class="mm-quiet">{words}</div>{bar}'
