"""HTML and SVG as text: pages that fetch nothing, tables, notes, shapes. Texts are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from ...own.calls import OwnCodeError
from ...params.base import without_controls
from .style import DARK_PAGE, STYLE

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>{style}<style>
:root {{color-scheme: light dark}} {dark}
body {{background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 62rem}}
body {{margin: 0 auto; padding: 1rem}}
h2 {{margin-top: 2em}} pre {{overflow-x: auto; font-size: 13px}}
</style></head><body><main><h1>{title}</h1>{body}</main></body></html>
"""

Point = tuple[float, float]

_NARROW_LETTERS = set("fijlrtI.,:;|!'()[] ")


def shown(words: object) -> str:
    """Return a text of somebody else, such as the name of a folder, for a page: escaped, without control characters."""
    return escape(without_controls(str(words)))


def page(title: str, body: str) -> str:
    """Return a complete HTML page that fetches nothing; `body` is HTML already."""
    return _PAGE.format(title=shown(title), style=STYLE, dark=DARK_PAGE, body=body)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table that scrolls sideways on a narrow page."""
    html_rows = []
    for row in rows:
        html = ""
        for cell in row:
            words = f"{cell:,}" if isinstance(cell, int) else str(cell)
            html += f"<td>{escape(words)}</td>"
        html_rows.append(html)
    label = next((name for name in head if name), "table")
    return table_of_cells([escape(name) for name in head], html_rows, label=label)


def table_of_cells(head: Iterable[str], rows: Iterable[str], *, label: str, look: str = "mm-table") -> str:
    """Return an HTML table that scrolls sideways on a narrow page.

    Args:
        head: the titles of the columns, as HTML.
        rows: the `<td>`s of each row.
        label: of the table, for screen readers.
        look: classes of the table.
    """
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join(f"<tr>{cells}</tr>" for cells in rows)
    html = f'<table class="{look}"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>'
    # With the keyboard, too, a person can scroll it.
    return f'<div class="mm-scroll" tabindex="0" role="group" aria-label="{escape(label)}">{html}</div>'


def key_figures(figures: Iterable[tuple[str, str]]) -> str:
    """Return (value, label) pairs side by side, each value large over its label."""
    cells = "".join(f"<div><b>{escape(value)}</b> {escape(label)}</div>" for value, label in figures)
    return f'<div class="mm-figures">{cells}</div>' if cells else ""


def note(message: object, kind: str = "quiet", *, role: str = "") -> str:
    """Return a line of text. kind: quiet, warning or error. role: alert or status, for screen readers."""
    attribute = f' role="{role}"' if role else ""
    return f'<div class="mm-{kind}"{attribute}>{shown(message)}</div>'


def error_note(error: Exception, *, role: str = "alert") -> str:
    """Return an error as a line of text, and below it the lines of a person's own code that raised it, if any."""
    lines = error.traceback if isinstance(error, OwnCodeError) else ""
    own = f'<pre class="mm-log mm-scroll" tabindex="0">{escape(lines)}</pre>' if lines else ""
    return note(str(error) or type(error).__name__, "error", role=role) + own


def svg(width: float, height: float, description: str, *parts: str, role: str = "img") -> str:
    """Return a picture of width x height pixels that scales down with its page. Screen readers read the description."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="{role}" style="max-width:100%;height:auto;font-family:system-ui,sans-serif">'
        f"<title>{escape(description)}</title>{''.join(parts)}</svg>"
    )


def text(
    x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", color: str = "currentColor"
) -> str:
    """Return a line of text with its baseline at y and its anchor (start, middle, end) at x."""
    look = f'font-size="{size:g}" fill="{color}"'
    if anchor != "start":  # which is every text's, without a word
        look += f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(str(words))}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, *, outline: str = "") -> str:
    """Return a filled rectangle. outline: SVG attributes such as stroke="white"."""
    frame = f'x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{max(0, height):.1f}"'
    return f'<rect {frame} fill="{color}" {outline}></rect>'


def path(points: Sequence[Point], color: str, *, width: float = 1.6, dash: str = "none") -> str:
    """Return a line through points."""
    look = f'stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round" stroke-dasharray="{dash}"'
    data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="{data}" fill="none" {look}/>'


def width_of(words: str, size: float = 12) -> float:
    """Return the approximate width of a text in pixels."""
    narrow = sum(letter in _NARROW_LETTERS for letter in words)
    return size * (0.32 * narrow + 0.6 * (len(words) - narrow))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers from low to high."""
    smallest_step = (high - low) / count
    if not smallest_step > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(smallest_step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= smallest_step * 0.99)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short_number(value: float) -> str:
    """Return a number as an axis shows it: 8.5e-8, 0.25, 12, 35k, 2M."""
    size = abs(value)
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / divisor:.3g}{letter}"
    if size >= 1 or value == 0:
        return f"{value:.4g}"
    return f"{value:.2g}".replace("e-0", "e-")
