"""RunPanel: a run as it goes, drawn from its folder. Closing the panel, the browser or the kernel leaves the run be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path

import ipywidgets as w

from .. import runs
from ..launch import Run
from ..plots import History, charts
from ..report import levels
from ..watch import Progress, Ranks, Rows, Tail, clock
from .actions import Actions
from .audience import Audience
from .log import LogView
from .ranks import grid, tracebacks
from .style import Whole, close_all, note

PAUSE = 0.3
"""Seconds between two looks at the folder, and so at least between two updates of the page."""
IDLE = 1.0
"""The same, when nothing has come for a while."""
BACKLOG = 1 << 20
"""Bytes of log that one look takes in; of more, only the newest."""
STEADY = {"saved"}
"""Events that are told, but not marked on every curve."""
COLORS = {
    runs.Status.FAILED: "danger",
    runs.Status.LOST: "danger",
    runs.Status.CANCELLED: "warning",
    runs.Status.COMPLETED: "success",
}


class RunPanel(Whole):
    """State, progress, ranks, curves and log of a run, kept up to date by a thread until it ends; and its buttons.

    Cheap to make again: `RunPanel("runs/first")` shows all there is, after a page reload or a kernel restart too.
    Raises ValueError where there is no such run.
    """

    _newest: dict[Path, RunPanel] = {}

    def __init__(self, path: str | Path):
        self.run = Run.open(path)
        self.state = self.run.state()
        record = self.run.record
        self._ranks = Ranks(self.run.path, record.ranks if record else 0)
        self._tail, self._rows = Tail(self.run.path, backlog=BACKLOG), Rows(self.run.path)
        self._history, self._progress = History(), Progress(self.run.path)
        self._audience, self._closing = Audience(), threading.Event()
        self._often = [Seldom(1.0, self._draw_curves), Seldom(1.0, self._draw_ranks)]
        self._head, self._curves, self._grid, self._told = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self._bar = w.IntProgress(min=0, max=max(1, self.state.steps), layout=w.Layout(width="auto", height="12px"))
        self._bar.tooltip = "steps done"
        self.actions, self.logs = Actions(self.run, again=self._begin), LogView(self._ranks.count)
        self.logs.first.on_click(lambda _: threading.Thread(target=self._find_error, daemon=True).start())
        super().__init__([self._head, self._bar, self.actions, self._grid, self._told, self._curves, self.logs])
        self._over = threading.Event()
        self._over.set()
        self._replace_older()
        self._begin()

    def wait(self, timeout: float | None = None) -> runs.RunState:
        """Wait until the run is over and all is drawn, or `timeout` seconds; the state it has then.

        Interrupting the cell ends the waiting, not the run.
        """
        self._over.wait(timeout)  # joining a thread would not do: interrupted, Python 3.11 takes it for ended
        return self.state

    def close(self) -> None:
        """Stop drawing. The run goes on."""
        self._let_go()
        super().close()

    def _let_go(self) -> None:
        self._closing.set()
        self._audience.back.set()
        self._audience.close()

    def _replace_older(self) -> None:
        """One panel a run is enough: the older one, whose cell was run again, lets go of what it holds."""
        older = self._newest.pop(self.run.path, None)
        if older is not None and older.comm is not None:
            older._let_go()
            before = older.children
            older.children = [w.HTML(note(f"{self.run.name} is shown anew elsewhere"))]
            for child in before:
                close_all(child)
        self._newest[self.run.path] = self

    def _begin(self) -> None:
        """Watch the run until it ends."""
        if self._over.is_set():
            self._over.clear()
            threading.Thread(target=self._watch_or_say, daemon=True, name=f"watch {self.run.path}").start()

    def _watch_or_say(self) -> None:
        try:
            self._watch()
        except Exception as error:  # nobody is above this thread: a panel that stands still says why
            self.actions.say(f"this panel stopped: {error or type(error).__name__}; make it again", bad=True)
            raise
        finally:
            self._over.set()

    def _watch(self) -> None:
        changed = time.monotonic()
        drawn = changed - PAUSE  # what there is at the beginning is shown at once
        while not self._closing.is_set():
            try:
                state = self.run.state()  # before the files: what is read after the end is all there is
                news, more = self._read(state)
            except OSError as error:  # a shared disk that does not answer, too many open files: such things pass
                self.actions.say(f"the run's folder cannot be read just now, so it is tried again: {error}", bad=True)
                self._closing.wait(IDLE)
                continue
            now = time.monotonic()
            changed = now if news else changed
            pace = self._audience.pace(PAUSE)
            if now - drawn >= (max(1.0, pace) if more else pace - 0.02) or news == "state" or state.done and not more:
                drawn = now
                self._draw(whole=state.done and not more)
            if state.done and not more:
                return
            if not more:
                self._audience.back.wait(min(IDLE, max(PAUSE, (now - changed) / 20, pace)))
                if self._audience.back.is_set():
                    self._audience.back.clear()
                    drawn = 0.0

    def _read(self, state: runs.RunState) -> tuple[str, bool]:
        """(what is new: state, lines or nothing; whether there is more to be read at once)."""
        lines = self._tail.poll(last=state.done)
        rows, more = self._rows.poll()
        if self._rows.anew:
            self._history.clear()
        self._history.add(rows)
        self._progress.add(rows)
        self.logs.add(lines)
        news = "state" if (state.status, state.reason) != (self.state.status, self.state.reason) else ""
        self.state = state
        return news or ("lines" if lines or rows else ""), more

    def _draw(self, *, whole: bool) -> None:
        self._draw_state()
        self.logs.draw()
        for part in self._often:
            part(now=whole)

    def _draw_state(self) -> None:
        state = self.state
        left = None if state.done else self._progress.seconds_left(state)
        words = f"<b>{escape(self.run.name)}</b> {escape(str(state))}"
        if left:
            words += f', <span class="mm-quiet">{clock(left)} left</span>'
        self._head.value = words
        self._bar.max, self._bar.value = max(1, state.steps), state.step
        self._bar.bar_style = COLORS.get(state.status, "info")
        self.actions.show(state)

    def _draw_ranks(self) -> None:
        ranks = self._ranks.poll(self.state)
        self._grid.value = grid(ranks, key=self.model_id)
        self._told.value = tracebacks(ranks, key=self.model_id)

    def _draw_curves(self) -> None:
        events = runs.read_events(self.run.path, size=runs.NEWEST)
        cost = (runs.read_json(self.run.path / "plan.json") or {}).get("estimate") or {}
        told = [(e["kind"], e["step"], f"{e['kind']}: {e.get('text', '')}") for e in events]
        marks = [(step, words) for kind, step, words in told if kind not in STEADY][-50:]
        listed = "".join(f"<li>step {step}, {escape(words)}</li>" for _, step, words in told[-4:])
        row = self._progress.recent[-1] if self._progress.recent else {}
        drawn = charts(self._history, total=self.state.steps, predicted=levels(cost, row), marks=marks)
        sent = row.get("wire_bytes")
        if sent is not None and cost.get("wire_bytes") is not None:
            words = f"sent in a step: {sent / 2**20:,.2f} MiB, predicted {cost['wire_bytes'] / 2**20:,.2f}"
            drawn += note(words)
        self._curves.value = drawn + (f'<ul class="mm-quiet">{listed}</ul>' if listed else "")

    def _find_error(self) -> None:
        from ..watch import first_error

        first = [] if self.state.rank is None else [self.state.rank]
        lines = first_error(self.run.path, first)
        rank = lines[0].rank if lines else None
        self.logs.hold(lines, "no line tells of an error" if rank is None else f"rank {rank}: around its first error")


class Seldom:
    """Calls a function at most so often, and less often where it is slow: a fiftieth of a core is all it may take."""

    SHARE = 0.02

    def __init__(self, least: float, act: Callable[[], None]) -> None:
        self._least, self._act, self._next = least, act, 0.0

    def __call__(self, *, now: bool = False) -> None:
        """Do it if it is time, or `now`."""
        if now or time.monotonic() >= self._next:
            start = time.thread_time()
            self._act()
            self._next = time.monotonic() + max(self._least, (time.thread_time() - start) / self.SHARE)
