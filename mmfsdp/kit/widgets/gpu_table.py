"""A table of the ranks' GPUs: how well each is used. Medians over the newest steps; empty for a run on CPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...params.in_words import size
from ..run.files.folder import read_metrics
from .markup import note, table

MAX_RANKS = 64
"""Ranks that have a line."""
NEWEST_BYTES = 200_000
"""Bytes of a rank's metrics that are read: some 500 steps."""
COLUMNS = {
    "mfu": ("MFU", "{:.1%}".format),
    "hfu": ("HFU", "{:.1%}".format),
    "mfu_6n": ("6 N would say", "{:.1%}".format),
    "memory_bytes": ("peak memory", size),
    "reserved_bytes": ("reserved", size),
    "gpu_use": ("use", "{:.0%}".format),
    "power_w": ("power", "{:,.0f} W".format),
    "temperature_c": ("temperature", "{:.0f} °C".format),
}
"""Keys of a row of metrics: head of the column, and how a number is written."""
ABOUT = (
    "MFU: FLOPs that a step needs, over its seconds and the peak of the card; HFU: those that run. 6 N: 6 FLOPs for "
    "each parameter and token, as if all of the model trained on text."
)


def gpu_table(folder: Path, ranks: int) -> str:
    """Return a line for each rank that trained on a GPU, with the columns that are known."""
    medians = []
    for rank in range(min(ranks, MAX_RANKS)):
        rows = read_metrics(folder, rank, last_bytes=NEWEST_BYTES)
        if rows and "reserved_bytes" in rows[-1]:  # else it trains on a CPU
            medians.append({"rank": rank} | median_figures(rows))
    keys = [key for key in COLUMNS if any(key in figures for figures in medians)]
    if not keys:
        return ""
    lines: list[list[object]] = []
    for figures in medians:
        cells = [COLUMNS[key][1](figures[key]) if key in figures else "–" for key in keys]
        lines.append([figures["rank"], *cells])
    html = table(["rank", *(COLUMNS[key][0] for key in keys)], lines)
    return html + note(ABOUT) if "mfu" in keys else html


def median_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each key of COLUMNS over some rows."""
    figures = {}
    for key in COLUMNS:
        values = [row[key] for row in rows if key in row and math.isfinite(row[key])]
        if values:
            figures[key] = median(values)
    return figures
