"""Predicted beside measured, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from ..style import INK, TRAINABLE
from .svg import rect, svg, text, width_of

ROW, WIDTH, LABEL = 44, 620, 120


def bars(rows: Sequence[tuple[str, float | None, float | None]], *, unit: str) -> str:
    """Predicted beside measured, as SVG: one pair of bars per (label, predicted, measured); None draws no bar."""
    label = max([LABEL, *(width_of(name, 12) + 12 for name, *_ in rows)])
    most = max([value for row in rows for value in row[1:] if value is not None and value > 0], default=1.0)
    scale = (WIDTH - label - 70) / most
    parts = []
    for i, (name, color) in enumerate((("predicted", INK), ("measured", TRAINABLE))):
        parts += [rect(label + 100 * i, 4, 12, 12, color), text(label + 17 + 100 * i, 14, name, size=12)]
    for i, (name, *values) in enumerate(rows):
        top = 26 + ROW * i
        parts.append(text(label - 8, top + 19, name, size=12, anchor="end"))
        for j, (value, color) in enumerate(zip(values, (INK, TRAINABLE), strict=True)):
            if value is not None:
                parts.append(rect(label, top + 15 * j, value * scale, 13, color))
                parts.append(text(label + value * scale + 5, top + 15 * j + 11, f"{value:,.4g}", size=11))
    height = 26 + ROW * len(rows) + 14
    words = "; ".join(f"{name}: {p} predicted, {m} measured" for name, p, m in rows)
    return svg(WIDTH, height, words, *parts, text(label, height - 6, unit))
