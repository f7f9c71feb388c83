"""Pictures of collectives, memory and time as SVG: boxes in the package's palette, for notebooks and deck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mmfsdp.kit.widgets.markup import width_of
from mmfsdp.kit.widgets.style import ACTIVATIONS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE

RANK_COLORS = (FROZEN, TRAINABLE, GATHERED, REDUCED)
LEDGER_COLORS = {"parameters": FROZEN, "gradients": REDUCED, "optimizer": OPTIMIZER, "activations": ACTIVATIONS}
LEDGER_COLORS |= {"compute": FROZEN, "exposed": TRAINABLE, "gathered": GATHERED}
BOX, GAP, WIDE = 34, 4, 740


class Picture(str):
    """SVG text that Jupyter shows as a picture."""

    def _repr_svg_(self) -> str:
        return self


def collective(kind: str, *, ranks: int = 4) -> Picture:
    """What each rank holds before and after an all-gather, reduce-scatter, all-reduce or broadcast."""
    before, after = _STATES[kind](ranks)
    width = ranks * (BOX + GAP)
    parts = [_text(60 + width / 2, 16, "before"), _text(60 + width * 1.5 + 130, 16, "after")]
    for rank in range(ranks):
        y = 28 + rank * (BOX + 10)
        parts.append(_text(48, y + BOX / 2 + 4, f"rank {rank}", anchor="end"))
        parts += _blocks(60, y, before[rank]) + _blocks(60 + width + 130, y, after[rank])
    middle = 28 + (ranks * (BOX + 10) - 10) / 2
    parts.append(_arrow(60 + width + 20, middle, 60 + width + 108, middle, kind))
    return _svg(60 + 2 * width + 140, 34 + ranks * (BOX + 10), parts, f"{kind} over {ranks} ranks")


def _gather(ranks: int) -> tuple[list, list]:
    own = [[(str(r), r) if r == at else None for r in range(ranks)] for at in range(ranks)]
    return own, [[(str(r), r) for r in range(ranks)]] * ranks


def _scatter(ranks: int) -> tuple[list, list]:
    each = [[(f"{'abcdefgh'[at]}{r}", r) for r in range(ranks)] for at in range(ranks)]
    return each, [[(f"Σ{r}", r) if r == at else None for r in range(ranks)] for at in range(ranks)]


def _reduce(ranks: int) -> tuple[list, list]:
    return _scatter(ranks)[0], [[(f"Σ{r}", r) for r in range(ranks)]] * ranks


def _broadcast(ranks: int) -> tuple[list, list]:
    first = [(str(r), 0) for r in range(ranks)]
    return [first] + [[None] * ranks] * (ranks - 1), [first] * ranks


_STATES = {"all-gather": _gather, "reduce-scatter": _scatter, "all-reduce": _reduce, "broadcast": _broadcast}


def ledger(rows: Mapping[str, Mapping[str, float]], *, unit: str = "GiB", limit: float | None = None) -> Picture:
    """Bars of what a rank holds, by row, as in {'DDP': {'parameters': 26.1, 'gradients': ...}}. limit: its memory."""
    most = max([sum(row.values()) for row in rows.values()] + [limit or 0])
    left = max(142.0, *(1.2 * width_of(name, 14) for name in rows)) + 8
    scale = (WIDE - left - 110) / most
    parts = []
    for i, (name, row) in enumerate(rows.items()):
        y, x = 30 + i * 46, left
        parts.append(_text(left - 8, y + 19, name, anchor="end"))
        for what, value in row.items():
            color = LEDGER_COLORS.get(what, INK)
            parts.append(_box(x, y, value * scale, 28, color, title=f"{name}: {what} {value:.3g} {unit}"))
            if value * scale > 44:
                middle = _middle(x, x + value * scale, left + limit * scale if limit else None)
                parts.append(_text(middle, y + 19, f"{value:.3g}", fill=_ink_on(color)))
            x += value * scale
        parts.append(_text(x + 8, y + 19, f"{sum(row.values()):.3g} {unit}", anchor="start"))
    high = 30 + len(rows) * 46
    if limit:
        x = left + limit * scale
        parts.append(f"<line x1='{x}' x2='{x}' y1='20' y2='{high}' stroke='{INK}' stroke-dasharray='5 4'/>")
        parts.append(_text(x, 14, f"the device: {limit:.3g} {unit}"))
    x = 8.0
    for what in dict.fromkeys(k for row in rows.values() for k in row):
        parts += [
            _box(x, high + 4, 14, 14, LEDGER_COLORS.get(what, INK)),
            _text(x + 20, high + 16, what, anchor="start"),
        ]
        x += 44 + width_of(what, 14)
    return _svg(
        WIDE,
        high + 28,
        parts,
        f"{', '.join(dict.fromkeys(k for row in rows.values() for k in row))}, in {unit}: " + "; ".join(rows),
    )


def _middle(start: float, end: float, line: float | None) -> float:
    """Return where a number stands in a box: in its middle, or beside an upright line that would cross the number."""
    middle = (start + end) / 2
    if line is None or abs(line - middle) > 24:
        return middle
    return (start + line) / 2 if line - start > end - line else (line + end) / 2


def ranking(values: Mapping[str, float], *, unit: str) -> Picture:
    """One bar for each name; those of mmfsdp's own policies ('frozen-aware ...') stand out."""
    scale, parts = 400 / max(values.values()), []
    for i, (name, value) in enumerate(values.items()):
        y = 6 + i * 36
        parts.append(_text(248, y + 19, name, anchor="end"))
        parts.append(_box(256, y, value * scale, 28, TRAINABLE if name.startswith("frozen-aware") else FROZEN))
        parts.append(_text(264 + value * scale, y + 19, f"{value:,.3g} {unit}", anchor="start"))
    return _svg(760, 10 + len(values) * 36, parts, f"by name, in {unit}")


def timeline(units: int = 4, *, gather: float = 0.8, compute: float = 1.0, prefetch: bool = True) -> Picture:
    """Forward of so many units: all-gathers on one stream, compute on the other; how long compute waits."""
    gathered, done, parts = 0.0, 0.0, []
    waits = 0.0
    scale = 620 / (units * (gather + compute) + 0.2)
    for unit in range(units):
        start = gathered if prefetch else max(gathered, done)
        gathered = start + gather
        begin = max(gathered, done)
        waits += begin - done
        done = begin + compute
        for y, at, length, color, word in (
            (30, start, gather, GATHERED, f"unit {unit}"),
            (70, begin, compute, FROZEN, f"unit {unit}"),
        ):
            parts.append(_box(90 + at * scale, y, length * scale - 2, 30, color))
            parts.append(_text(90 + (at + length / 2) * scale, y + 20, word, fill=_ink_on(color)))
    parts += [_text(82, 50, "all-gather", anchor="end"), _text(82, 90, "compute", anchor="end")]
    words = f"{'with' if prefetch else 'without'} prefetch: {done:.2g} time units, {waits:.2g} of them waiting"
    parts.append(_text(90, 18, words, anchor="start"))
    return _svg(740, 112, parts, words)


def _blocks(x: float, y: float, held: Sequence[tuple[str, int] | None]) -> list[str]:
    parts = []
    for i, block in enumerate(held):
        at = x + i * (BOX + GAP)
        if block is None:
            parts.append(
                f"<rect x='{at}' y='{y}' width='{BOX}' height='{BOX}' fill='none' stroke='{INK}' "
                "stroke-dasharray='3 3'/>"
            )
        else:
            word, rank = block
            color = RANK_COLORS[rank % 4]
            parts.append(_box(at, y, BOX, BOX, color))
            parts.append(_text(at + BOX / 2, y + BOX / 2 + 5, word, fill=_ink_on(color)))
    return parts


def _ink_on(color: str) -> str:
    """Return the color of text on a box: the one of more contrast, at least 4.4:1 on all colors of this file."""
    return "#fff" if color in (FROZEN, TRAINABLE, INK) else "#111"


def _box(x: float, y: float, dx: float, dy: float, color: str, *, title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(dx, 0):.1f}' height='{dy}' rx='3' fill='{color}'>{hover}</rect>"


def _text(x: float, y: float, words: str, *, anchor: str = "middle", fill: str = "currentColor") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{fill}'>{escape(words)}</text>"


def _arrow(x1: float, y1: float, x2: float, y2: float, words: str) -> str:
    head = f"M{x2},{y2} l-9,-5 v10 z"
    line = f"<line x1='{x1}' y1='{y1}' x2='{x2 - 8}' y2='{y2}' stroke='{INK}' stroke-width='2'/>"
    return f"{line}<path d='{head}' fill='{INK}'/>" + _text((x1 + x2) / 2, y1 - 10, words)


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> Picture:
    style = "font-family:system-ui,sans-serif;font-size:14px;max-width:100%"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
    return Picture(
        f"{head}height='{height:.0f}' role='img' aria-label='{escape(label)}' style='{style}'>{''.join(parts)}</svg>"
    )


def shares(rows: Mapping[str, Mapping[str, float]]) -> Picture:
    """A table of shares by row and column, each a box that is as full as the share is large."""
    columns = list(next(iter(rows.values())))
    left, wide = max(map(len, rows)) * 8 + 16, 96
    parts = [_text(left + (i + 0.5) * wide, 16, name) for i, name in enumerate(columns)]
    for j, (name, row) in enumerate(rows.items()):
        y = 26 + 34 * j
        parts.append(_text(left - 8, y + 19, name, anchor="end"))
        for i, value in enumerate(row.values()):
            x, full = left + i * wide, wide - 8
            parts += [_box(x, y, full, 28, f"{INK}33"), _box(x, y, full * value, 28, f"{GATHERED}66")]
            parts.append(_text(x + full / 2, y + 19, f"{value:.0%}"))
    return _svg(left + wide * len(columns) + 8, 32 + 34 * len(rows), parts, "shares: " + "; ".join(rows))


def grid(values: Any, *, rows: Sequence[str], columns: Sequence[str]) -> Picture:
    """A matrix of numbers as squares, the larger the darker; rest the mouse on one for its value."""
    high = max((width_of(name, 14) for name in columns), default=0) + 16
    left = 1.2 * max((width_of(name, 14) for name in rows), default=0) + 14
    most = max((float(value) for row in values for value in row), default=0) or 1.0
    parts = []
    for j, name in enumerate(columns):
        x = left + j * 26 + 16
        parts.append(f"<g transform='rotate(-60 {x} {high - 6})'>{_text(x, high - 6, name, anchor='start')}</g>")
    for i, (name, row) in enumerate(zip(rows, values, strict=True)):
        parts.append(_text(left - 8, high + i * 26 + 17, name, anchor="end"))
        for j, value in enumerate(row):
            parts.append(
                f"<rect x='{left + j * 26}' y='{high + i * 26}' width='24' height='24' fill='{FROZEN}' "
                f"fill-opacity='{float(value) / most:.3f}' stroke='{INK}' stroke-width='0.5'>"
                f"<title>{escape(name)}, {escape(columns[j])}: {float(value):.3f}</title></rect>"
            )
    return _svg(left + len(columns) * 26 + 60, high + len(rows) * 26 + 8, parts, "a matrix: larger values are darker")
