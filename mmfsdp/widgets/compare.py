"""Runs compared from their folders: parameters that differ, figures, charts."""

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
from .charts import Charts, charts_html
from .markup import note, page, table
from .report import read_params
from .style import STYLE


def show_comparison(folders: Sequence[str | Path]) -> w.VBox:
    """Return runs side by side: parameters that differ, figures, curves. Raises as `comparison`."""
    charts = Charts(folders)
    charts.ended = all(run_state(folder).done for folder in folders)
    table = w.HTML(STYLE + comparison(folders))
    return w.VBox([table, charts])


def write_comparison(folders: Sequence[str | Path], to: str | Path) -> Path:
    """Write a self-contained page of runs compared, and return its path. Raises as `comparison`."""
    write_text(to, page("Runs compared", comparison(folders) + charts_html(folders)))
    return Path(to)


def comparison(folders: Sequence[str | Path]) -> str:
    """Return what differs between runs as an HTML table. Raises ParamError for a folder that is no run."""
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
    figures = [run_figures(path) for path in paths]
    for name in figures[0] if figures else ():
        values = [each[name] for each in figures]
        rows.append([name, *(_cell(value) for value in values)])
    return table(["", *map(str, paths)], rows) + note("Parameters that are equal are left out.")


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if math.isfinite(value) else "not finite"


def run_figures(folder: Path) -> dict[str, float | None]:
    """Return the numbers to judge a run by; None where they are not known."""
    result, rows = read_result(folder), read_metrics(folder)
    newest = rows[-1] if rows else {}
    losses = [row["loss"] for row in rows if "loss" in row]
    rates = [row["samples_per_s"] for row in rows if math.isfinite(row.get("samples_per_s", math.nan))]
    shares = [row["mfu"] for row in rows if math.isfinite(row.get("mfu", math.nan))]
    return {
        "loss": mean(losses[-max(1, len(losses) // 10) :]) if losses else None,  # of the last tenth of the steps
        "new pictures right": result.get("heldout_exact_match"),
        "never-seen combinations right": result.get("unseen_combination_exact_match"),
        "samples/s": median(rates) if rates else None,
        "MFU %": 100 * median(shares) if shares else None,
        "MiB sent in a step": newest["wire_bytes"] / 2**20 if "wire_bytes" in newest else None,
        "peak MiB": newest["memory_bytes"] / 2**20 if "memory_bytes" in newest else None,
    }
