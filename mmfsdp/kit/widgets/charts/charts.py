"""Charts: the metrics of runs, drawn by uPlot in the page of a notebook."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w
import traitlets

from ..cell import close_all, receive_while_busy
from ..markup import note
from ..static_files import chart_sheet, script
from ..style import RUN_COLORS
from .chart_data import Columns, Table
from .charts_page import PAGE_PIXELS, names_of, payload
from .static_chart import static_charts

NO_ANSWER_S = 5.0
"""Seconds without a question of the page after which pictures are shown in place of live charts."""
BUSY_S = 15.0
"""The same for a page that has asked before: a hidden one asks every 10 s."""
UNHEARD_S = 3.0
"""Seconds after an answer in which the page says that it has got one."""
MAX_RENEWALS = 5
"""Times that a page that gets no answers is given its charts anew."""
MIN_PIXELS, MAX_PIXELS = 50, 4000
"""Widths of a chart that a page may ask for."""
STATIC_PIXELS = 300
INSTALL = (
    "These pictures stand still: this page has not loaded anywidget. Install it where JupyterLab's server runs "
    "(pip install anywidget), and reload the page for charts with crosshair and zoom."
)
LOADS_AGAIN = (
    "These pictures stand still: the page was too busy to load its charts within 2 seconds, and does not get their "
    "points. It is given them again; if that does not help, reload the page."
)
NO_ROOM = "These pictures stand still while a cell runs: charts need ipykernel 7 and JupyterLab 4.4 for that."


_MODULE = """
export default {
  render({ model, el }) {
    const root = document.createElement("div");
    el.append(root);
    const send = message => {
      try { model.send(message); } catch { /* the kernel has restarted: nobody answers any more */ }
    };
    const spec = { ...model.get("spec") };
    const charts = mmCharts(root, spec, { ask: request => send({ ask: request }), heard: () => send({ heard: true }) });
    const take = message => { if (message.tables) charts.take(message); };
    const change = () => charts.change({ ...model.get("spec") });
    model.on("msg:custom", take);
    model.on("change:spec", change);
    return () => { model.off("msg:custom", take); model.off("change:spec", change); charts.close(); };
  },
};
"""


class LiveCharts(anywidget.AnyWidget):
    """The charts in the page. It asks for points; nothing is sent that it has not asked for."""

    spec = traitlets.Dict().tag(sync=True)
    """total, predicted, colors: what a page needs after a reload, besides the points."""

    def __init__(self, **traits: Any):
        self._esm, self._css = script() + _MODULE, chart_sheet()
        super().__init__(**traits)


class Charts(w.VBox):
    """Charts of one run, or of several, from their folders.

    The page asks for what is new as long as it is shown, and the kernel reads on from where it stopped. A page that
    does not ask, for want of anywidget's extension, gets pictures, drawn by `draw`. So does one that asks but gets no
    answer, and then its charts anew: anywidget 0.11 drops all messages to a widget whose script took more than 2 s to
    load (`Runtime.ready` in its front end).
    """

    def __init__(
        self,
        folders: Sequence[str | Path] | str | Path,
        *,
        total: int | None = None,
        predicted: Mapping[str, float | None] | None = None,
        height: int = 130,
        compact: bool = False,
    ):
        """total: steps of the whole run. predicted: values by the metric's key. height: pixels of a chart.

        compact: titles of one line, and the tools below the charts.
        """
        paths = [folders] if isinstance(folders, str | Path) else list(folders)
        self._columns = {name: Columns(path) for name, path in names_of(paths).items()}
        self._lock = threading.Lock()  # the page asks in one thread, a panel draws in another
        self._asked_at: float | None = None  # when a page that gets our answers asked last
        self.unheard_since: float | None = None  # when we answered a page that has not said since that it got it
        self.renewals = 0
        self.timers: list[threading.Timer] = []
        self.born = time.monotonic()
        self.ended = False
        """True once no more rows are to come: the page stops asking."""
        self._spec: dict[str, Any] = {"colors": list(RUN_COLORS), "height": height, "compact": compact}
        self.live = self._make_live(self._spec)
        self.pictures = w.HTML()
        self._stage = w.Box([self.live], layout=w.Layout(display="block"))
        super().__init__([self._stage, self.pictures])
        self.describe(total=total, predicted=predicted)
        self._draw_after(NO_ANSWER_S)

    def _make_live(self, spec: dict[str, Any]) -> LiveCharts:
        """Return charts for the page, and listen to them."""
        live = LiveCharts(spec=spec)
        live.on_msg(lambda _, message, buffers: self._answer(message))
        receive_while_busy(live)
        return live

    def _draw_after(self, seconds: float) -> None:
        """Start a timer that draws pictures if no page answers until then."""
        timer = threading.Timer(seconds + 0.1, self.draw)
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    @property
    def rows(self) -> int:
        """Rows that were read so far, of all runs."""
        return sum(columns.rows for columns in self._columns.values())

    def describe(self, *, total: int | None, predicted: Mapping[str, float | None] | None = None) -> None:
        """Set the steps of the whole run, and predicted values by the metric's key."""
        known = {key: value for key, value in (predicted or {}).items() if value}
        spec = self._spec | {"total": total, "predicted": known}
        if spec != self.live.spec:
            self.live.spec = spec

    def draw(self) -> None:
        """Draw pictures if the page does not ask for points; call it after changes, as long as some are to come."""
        with self._lock:  # a timer and a panel may draw at once: one of them renews
            is_deaf = self.unheard_since is not None and time.monotonic() - self.unheard_since >= UNHEARD_S
            if is_deaf:
                self.unheard_since = None
        if is_deaf:
            self._renew()
        patience = NO_ANSWER_S if self._asked_at is None else BUSY_S
        if self._asked_at is not None and self.ended:
            return
        if time.monotonic() - (self._asked_at or self.born) < patience:
            return
        with self._lock:
            self._read()
            spec = self.live.spec
            html = static_charts(self._tables(STATIC_PIXELS), total=spec["total"], predicted=spec["predicted"])
        words = NO_ROOM
        if self._asked_at is None:
            words = LOADS_AGAIN if self.renewals else INSTALL
        self.pictures.value = html + note(words) if html else ""
        if html:
            self._stage.layout.display = "none"  # where anywidget is missing, a broken icon stands there

    def _answer(self, message: Any) -> None:
        """Send the page what it asks for."""
        if not isinstance(message, dict):
            return
        request = message.get("ask")
        if message.get("heard") or (isinstance(request, dict) and request.get("heard")):
            self._asked_at, self.unheard_since = time.monotonic(), None
            if self.pictures.value:
                self.pictures.value, self._stage.layout.display = "", "block"
        elif isinstance(request, dict) and self.unheard_since is None:
            self.unheard_since = time.monotonic()
            self._draw_after(UNHEARD_S)
        if not isinstance(request, dict):
            return
        self.live.send(self.reply(request))

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the page is sent for a question: the points that it lacks of what has been read so far.

        It holds `more` where not all is read yet, and `ended` where no more rows are to come.
        """
        ended = self.ended  # before reading: what is read after the end is all there is
        with self._lock:
            complete = self._read()
            points = self._points(request)
        return points | {"request": request.get("request"), "ended": ended, "more": not complete}

    def _renew(self) -> None:
        """Replace charts whose page asks but gets no answers."""
        if self.renewals < MAX_RENEWALS:
            self.renewals += 1
            deaf, self.live = self.live, self._make_live(self.live.spec)
            self._stage.children = [self.live]
            close_all(deaf)
            self._draw_after(NO_ANSWER_S)

    def _read(self) -> bool:
        """Read on. Return False if there is more to read."""
        results = [columns.read() for columns in self._columns.values()]
        return all(results)

    def _points(self, request: Mapping[str, Any]) -> dict[str, Any]:
        pixels = request.get("pixels")
        pixels = min(MAX_PIXELS, max(MIN_PIXELS, pixels)) if isinstance(pixels, int) else PAGE_PIXELS
        low, high = (_number(request.get(name)) for name in ("low", "high"))
        x = "time" if request.get("x") == "time" else "step"
        known = request.get("have")
        have = known if isinstance(known, dict) else {}
        return payload(self._tables(pixels, x=x, low=low, high=high, have=have))

    def _tables(self, pixels: int, *, have: Mapping[str, Any] | None = None, **view: Any) -> dict[str, Table]:
        tables = {}
        for name, columns in self._columns.items():
            of_page = (have or {}).get(name)
            tables[name] = columns.table(pixels, have=of_page if isinstance(of_page, dict) else None, **view)
            if len(self._columns) == 1:
                tables[name]["breaks"] = columns.breaks()
        return tables

    def close(self) -> None:
        """Remove the charts."""
        for timer in self.timers:
            timer.cancel()
        close_all(self.live)
        super().close()


def _number(value: Any) -> float | None:
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    return None
