"""Predicted beside measured, as bars."""

from __future__ import annotations

from collections.abc import Sequence

from .style import INK, TRAINABLE
from .svg import rect, svg, text, width_of

ROW, WIDTH, LABEL = 44, 440, 90


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


def compared(
    rows: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    labels: Sequence[str],
    ours: str,
    title: str,
    notes: str,
) -> str:
    """Ways to do one thing, as SVG: a row each, a column of bars per label.

    rows: name, and for each label a value and its ratio to the first row's. ours: what highlighted names begin with.
    """
    left = 1.15 * max(width_of(name, 12) for name, _ in rows) + 16  # fonts differ
    wide, tall = 250, 24
    parts = [text(8, 18, title, size=13), text(8, 36, notes, size=11)]
    for i, label in enumerate(labels):
        x, most = left + i * wide, max(values[i][0] for _, values in rows) or 1.0
        parts.append(text(x, 62, label, size=12))
        for j, (name, values) in enumerate(rows):
            (value, ratio), top = values[i], 70 + tall * j
            length = value / most * (wide - 110)
            parts.append(rect(x, top, length, tall - 7, TRAINABLE if name.startswith(ours) else INK))
            parts.append(text(x + length + 5, top + 13, f"{value:,.3g}" + f"  ({ratio:.2g}x)" * (j > 0), size=11))
    parts += [text(left - 8, 83 + tall * j, name, size=12, anchor="end") for j, (name, _) in enumerate(rows)]
    words = "; ".join(f"{name}: " + ", ".join(f"{value:.3g}" for value, _ in values) for name, values in rows)
    return svg(left + wide * len(labels), 76 + tall * len(rows), f"{title}: {', '.join(labels)}. {words}", *parts)
