"""Compute and communication of one step, beside each other in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .style import FROZEN, GATHERED, INK, REDUCED
from .svg import rect, svg, text, width_of

WIDTH, LANE = 900, 30
_COLORS = {"compute": FROZEN, "all-gather": GATHERED}
"""Every other kind is a reduction."""


def timeline(lanes: Mapping[str, Sequence[Sequence[float]]], *, seconds: float, title: str) -> str:
    """A step as SVG, one row per kind of work (compute first), a bar per interval.

    lanes: by kind, intervals (start, end) in seconds from the step's beginning; seconds: how long it took.
    """
    names = sorted(lanes, key=lambda name: (name != "compute", name))
    left = 1.15 * max([width_of(name, 12) for name in names], default=0) + 16
    scale, step = (WIDTH - left - 12) / (seconds or 1.0), _round(seconds / 6)
    bottom = 34 + LANE * len(names)
    parts = [text(8, 18, title, size=13)]
    for i, name in enumerate(names):
        top = 30 + LANE * i
        parts.append(text(left - 8, top + 17, name, size=12, anchor="end"))
        parts.append(rect(left, top + LANE - 6, seconds * scale, 1, INK))
        for start, end in lanes[name]:
            start, end = max(start, 0.0), min(end, seconds)
            parts.append(
                rect(left + start * scale, top, max((end - start) * scale, 0.5), LANE - 8, _COLORS.get(name, REDUCED))
            )
    for i in range(int(seconds / step) + 1):
        parts.append(text(left + i * step * scale, bottom + 12, f"{i * step * 1e3:.4g} ms", size=11, anchor="middle"))
    words = "; ".join(f"{name} {sum(b - a for a, b in lanes[name]):.3g} s" for name in names)
    return svg(WIDTH + 24, bottom + 22, f"{title}: {words}", *parts)


def _round(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, not below this."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if factor * power >= seconds:
                return factor * power
        power *= 10
