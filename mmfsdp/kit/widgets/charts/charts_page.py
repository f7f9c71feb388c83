"""Charts as HTML, for pages that stand alone and fetch nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ....params.base import without_controls
from ..static_files import chart_sheet, script
from ..style import RUN_COLORS
from .chart_data import Columns, Table
from .chart_table import charts_of, to_dict
from .static_chart import static_charts

PAGE_PIXELS = 600
"""Width of the charts of a page that cannot ask for more points."""


def run_names(folders: Iterable[str | Path]) -> list[str]:
    """Return what runs are called where several are shown: their paths from the folder that all of them are in.

    Of runs that share nothing but the root, those in the working folder are named from there, the others in full.
    """
    paths = [os.path.abspath(folder) for folder in folders]
    if not paths:
        return []
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    if shared != os.path.dirname(shared):
        names = [os.path.relpath(path, shared) for path in paths]
    else:
        names = []
        for path in paths:
            from_here = os.path.relpath(path)
            names.append(path if from_here.startswith(os.pardir) else from_here)
    path_of: dict[str, str] = {}
    for index, path in enumerate(paths):
        name = without_controls(names[index])
        while path_of.setdefault(name, path) != path:  # it differed in control characters alone
            name += "'"
        names[index] = name
    return names


def names_of(folders: Iterable[str | Path]) -> dict[str, Path]:
    """Return run folders by what they are called in charts."""
    paths = [Path(folder) for folder in folders]
    return dict(zip(run_names(paths), paths, strict=True))


def payload(tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return what `take` of the script is given: the charts, and the points of each run."""
    keys: set[str] = set()
    for table in tables.values():
        keys |= table["values"].keys()
    charts = [to_dict(chart) for chart in charts_of(keys)]
    return {"charts": charts, "tables": [{"name": name, **table} for name, table in tables.items()]}


def charts_html(
    folders: Iterable[str | Path],
    *,
    total: int | None = None,
    predicted: Mapping[str, float | None] | None = None,
    pixels: int = PAGE_PIXELS,
) -> str:
    """Return live charts of runs as HTML with its script, for a page of its own; "" where no run has any row.

    pixels: the points that are there, so that the page stays small; each keeps its least and its largest value.
    """
    tables = {}
    paths = names_of(folders)
    for name, folder in paths.items():
        columns = Columns(folder)
        columns.read(all_of_it=True)
        if columns.rows:
            tables[name] = columns.table(pixels)
            if len(paths) == 1:
                tables[name]["breaks"] = columns.breaks()
    if not tables:
        return ""
    known = {key: value for key, value in (predicted or {}).items() if value}
    spec = {"colors": list(RUN_COLORS), "total": total, "predicted": known}
    data = _for_script({"spec": spec, "reply": payload(tables)})
    start = (
        "(() => { const at = document.currentScript.previousElementSibling, data = DATA;"
        "at.replaceChildren(); let charts = null;"
        "const ask = request => { const answer = () => charts.take({...data.reply, request: request.request, "
        "ended: true}); charts ? answer() : queueMicrotask(answer); };"
        "charts = mmCharts(at, data.spec, {ask}); })();"
    ).replace("DATA", data)
    pictures = static_charts(tables, total=total, predicted=predicted)
    return (
        f"<style>{chart_sheet()}</style><div>{pictures}</div>"
        f"<script>if (!window.mmCharts) {{ {script()}\nwindow.mmCharts = mmCharts; }}\n{start}</script>"
    )


def _for_script(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
