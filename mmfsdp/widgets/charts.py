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

from .cell import close_all, receive_while_busy
from .chart_data import Columns, Table
from .charts_page import PAGE_PIXELS, names_of, payload
from .markup import note
from .static_chart import static_charts
from .static_files import chart_sheet, script
from .style import RUN_COLORS

NO_ANSWER_S = 5.0
"""Seconds without a question of the page after which pictures are shown in place of live charts."""
BUSY_S = 15.0
"""The same for a page that has asked before: a hidden one asks every 10 s."""
MIN_PIXELS, MAX_PIXELS = 50, 4000
"""Widths of a chart that a page may ask for."""
STATIC_PIXELS = 300
INSTALL = (
    "These pictures stand still: this page has not loaded anywidget. Install it where JupyterLab's server runs "
    "(pip install anywidget), and reload the page for charts with crosshair and zoom."
)
NO_ROOM = "These pictures stand still while a cell runs: charts need ipykernel 7 and JupyterLab 4.4 for that."


_MODULE = """
export default {
  render({ model, el }) {
    const root = document.createElement("div");
    el.append(root);
    const ask = request => {
      try { model.send({ ask: request }); } catch { /* the kernel has restarted: nobody answers any more */ }
    };
    const spec = { ...model.get("spec") };
    const charts = mmCharts(root, spec, { ask });
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
    does not ask, for want of anywidget's extension, gets pictures, drawn by `draw`.
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
        self._asked_at: float | None = None
        self._born = time.monotonic()
        self.ended = False
        """True once no more rows are to come: the page stops asking."""
        self._spec: dict[str, Any] = {"colors": list(RUN_COLORS), "height": height, "compact": compact}
        self.live = LiveCharts(spec=self._spec)
        self.live.on_msg(lambda _, message, buffers: self._answer(message))
        receive_while_busy(self.live)
        self.pictures = w.HTML()
        self._stage = w.Box([self.live], layout=w.Layout(display="block"))
        super().__init__([self._stage, self.pictures])
        self.describe(total=total, predicted=predicted)
        self._timer = threading.Timer(NO_ANSWER_S + 0.1, self.draw)
        self._timer.daemon = True
        self._timer.start()

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
        patience = NO_ANSWER_S if self._asked_at is None else BUSY_S
        if self._asked_at is not None and self.ended:
            return
        if time.monotonic() - (self._asked_at or self._born) < patience:
            return
        with self._lock:
            self._read()
            spec = self.live.spec
            html = static_charts(self._tables(STATIC_PIXELS), total=spec["total"], predicted=spec["predicted"])
        words = INSTALL if self._asked_at is None else NO_ROOM
        self.pictures.value = html + note(words) if html else ""
        if html:
            self._stage.layout.display = "none"  # where anywidget is missing, a broken icon stands there

    def _answer(self, message: Any) -> None:
        """Send the page what it asks for."""
        request = message.get("ask") if isinstance(message, dict) else None
        if not isinstance(request, dict):
            return
        self._asked_at = time.monotonic()
        if self.pictures.value:
            self.pictures.value, self._stage.layout.display = "", "block"
        ended = self.ended  # before reading: what is read after the end is all there is
        with self._lock:
            complete = self._read()
            reply = self._reply(request)
        self.live.send(reply | {"request": request.get("request"), "ended": ended, "more": not complete})

    def _read(self) -> bool:
        """Read on. Return False if there is more to read."""
        results = [columns.read() for columns in self._columns.values()]
        return all(results)

    def _reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
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
        return tables

    def close(self) -> None:
        """Remove the charts."""
        self._timer.cancel()
        close_all(self.live)
        super().close()


def _number(value: Any) -> float | None:
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    return None
