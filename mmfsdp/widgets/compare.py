"""Runs compared from their folders: parameters that differ, figures, curves."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import ipywidgets as w

from ..params import ParamError
from ..params.base import leaves
from ..run.folder import read_metrics, read_result, write_text
from ..run.state import is_run, run_state
from .curves import METRICS, History, Line, chart, metric_of
from .markup import note, page, table
from .report import read_params
from .style import COLORS, STYLE


def show_comparison(folders: Sequence[str | Path]) -> w.HTML:
    """Return runs side by side: parameters that differ, figures, curves. Raises as `comparison`."""
    return w.HTML(STYLE + comparison(folders))


def write_comparison(folders: Sequence[str | Path], to: str | Path) -> Path:
    """Write a self-contained page of runs compared, and return its path. Raises as `comparison`."""
    write_text(to, page("Runs compared", comparison(folders)))
    return Path(to)


def comparison(folders: Sequence[str | Path]) -> str:
    """Return runs side by side as HTML. Raises ParamError for a folder that is no run."""
    paths = [Path(os.path.expanduser(folder)) for folder in folders]
    for path in paths:
        if not is_run(path):
            raise ParamError("runs", f"{str(path)!r} is not a run; name folders of runs, such as runs/first")
    states = {path: run_state(path) for path in paths}
    paths.sort(key=lambda path: states[path].not_finite)  # those that diverged stand last
    rows: list[list[object]] = [["state", *(str(states[path]) for path in paths)]]
    params = [leaves(read_params(path)) for path in paths]
    for name in sorted(set().union(*params)):
        values = [each.get(name) for each in params]
        if name not in ("launch.name", "launch.folder") and any(value != values[0] for value in values):
            rows.append([name, *(str(value)[:40] for value in values)])
    histories = [History(read_metrics(path)) for path in paths]
    figures = [run_figures(path, history) for path, history in zip(paths, histories, strict=True)]
    for name in figures[0] if figures else ():
        values = [each[name] for each in figures]
        rows.append([name, *(_cell(value) for value in values)])
    html = table(["", *map(str, paths)], rows) + note("Parameters that are equal are left out.")
    lines: dict[str, list[Line]] = {key: [] for key in METRICS}  # of all runs, by metric
    for index, (path, history) in enumerate(zip(paths, histories, strict=True)):
        color = COLORS[index % len(COLORS)]
        html += f'<span style="color:{color}">{note(f"━ {path}")}</span>'
        for key, points in history.items():
            lines.setdefault(key, []).append(Line(str(path), points, color))
    pictures = "".join(chart(metric_of(key), of_runs) for key, of_runs in lines.items() if of_runs)
    return f'{html}<div class="mm-charts">{pictures}</div>'


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if math.isfinite(value) else "not finite"


def run_figures(folder: Path, history: History) -> dict[str, float | None]:
    """Return the numbers to judge a run by; None where they are not known."""
    result, newest = read_result(folder), history.newest
    losses = [point.value for point in history.get("loss", ())]
    rates = [point.value for point in history.get("samples_per_s", ()) if math.isfinite(point.value)]
    return {
        "loss": mean(losses[-max(1, len(losses) // 10) :]) if losses else None,  # of the last tenth of the steps
        "new pictures right": result.get("heldout_exact_match"),
        "never-seen combinations right": result.get("unseen_combination_exact_match"),
        "samples/s": median(rates) if rates else None,
        "MiB sent in a step": newest["wire_bytes"] / 2**20 if "wire_bytes" in newest else None,
        "peak MiB": newest["memory_bytes"] / 2**20 if "memory_bytes" in newest else None,
    }
