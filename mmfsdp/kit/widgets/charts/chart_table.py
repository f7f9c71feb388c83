"""The charts of a run, in order, with their metrics and units. A new metric is a line in CHARTS."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

SCORE = "scores."
"""Begins the key of a person's own score (`train.metrics`); each has a chart."""
LR_OF_PART = "lr "
"""Begins the key of the learning rate of a part (`train.lr_for`)."""
MAX_SCORES, MAX_PARTS, MAX_NAME = 24, 5, 40
"""Own scores and learning rates that are drawn, and letters of a name: anybody may have written the file."""


class Line(NamedTuple):
    """One metric in a chart."""

    key: str
    """The key in a row of metrics.jsonl."""
    label: str
    unit: str = ""
    """bytes, share (from 0 to 1, shown in percent), or any other word, which is only shown."""
    right: bool = False
    """True if the axis of the line is at the right."""
    dashed: bool = False


class Chart(NamedTuple):
    """Metrics that share an x axis and a title."""

    title: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    """The axis of values begins at 0."""
    log: bool = False
    """The axis may be logarithmic."""


CHARTS = (
    Chart("loss", (Line("loss", "training"), Line("heldout_loss", "held-out", dashed=True)), log=True),
    Chart("gradient norm", (Line("grad_norm", "norm"),), log=True),
    Chart(
        "throughput",
        (
            Line("samples_per_s", "samples/s"),
            Line("mfu", "MFU", "share", right=True),
            Line("hfu", "HFU", "share", right=True, dashed=True),
        ),
        from_zero=True,
    ),
    Chart(
        "memory of rank 0",
        (Line("memory_bytes", "peak", "bytes"), Line("reserved_bytes", "reserved", "bytes", dashed=True)),
        from_zero=True,
    ),
    Chart("learning rate", (Line("lr", "rate"),), from_zero=True, log=True),
    Chart("GPU use", (Line("gpu_use", "use", "share"),), from_zero=True),
    Chart("GPU power", (Line("power_w", "power", "W"), Line("temperature_c", "temperature", "°C", right=True))),
)

KEYS = frozenset(line.key for chart in CHARTS for line in chart.lines)


def is_drawn(key: str) -> bool:
    """Return True for the key of a metric that has a chart."""
    return key in KEYS or key.startswith((SCORE, LR_OF_PART))


def charts_of(keys: Collection[str]) -> list[Chart]:
    """Return the charts of the metrics that there are, with their lines alone; own scores have a chart each."""
    charts = []
    for chart in CHARTS:
        lines = [line for line in chart.lines if line.key in keys]
        if chart.title == "learning rate":
            parts = sorted(key for key in keys if key.startswith(LR_OF_PART))
            for key in parts[:MAX_PARTS]:
                lines.append(Line(key, key.removeprefix(LR_OF_PART)[:MAX_NAME], dashed=True))
        if lines:
            charts.append(chart._replace(lines=tuple(lines)))
    for key in sorted(key for key in keys if key.startswith(SCORE))[:MAX_SCORES]:
        name = key.removeprefix(SCORE)[:MAX_NAME]
        charts.append(Chart(name, (Line(key, name),)))
    return charts


def to_dict(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON has it, for the script that draws it."""
    return chart._asdict() | {"lines": [line._asdict() for line in chart.lines]}
