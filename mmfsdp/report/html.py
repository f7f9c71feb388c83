"""A page that needs nothing else, and its tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..plots.style import STYLE

_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>{style}<style>
:root {{color-scheme: light dark}}
body {{font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem}}
h2 {{margin-top: 2em}} pre {{overflow-x: auto; font-size: 13px}}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


class Html(str):
    """Text that is HTML already; every other text is escaped."""


def page(title: str, body: str) -> str:
    """A whole HTML page that needs nothing else; `body` is HTML already."""
    return _PAGE.format(title=escape(title), style=STYLE, body=body)


def writable(path: Path) -> Path:
    """That path where one may write it, else one in the current folder: for another person's run or page."""
    path = path.absolute()
    free = os.access(path.parent, os.W_OK | os.X_OK) and (not path.exists() or os.access(path, os.W_OK))
    return path if free else Path(f"{path.parent.name}-{path.name}").absolute()


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table that scrolls sideways where the page is narrow; every text escaped."""
    top = "".join(f"<th>{_cell(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="mm-scroll"><table class="mm-table"><tr>{top}</tr>{body}</table></div>'


def cells(shown: Iterable[tuple[str, str]]) -> str:
    """Figures side by side, large, each over the words that say what it is."""
    inside = "".join(f"<div><b>{escape(value)}</b>{escape(words)}</div>" for value, words in shown)
    return f'<div class="mm-figures">{inside}</div>' if inside else ""


def _cell(value: object) -> str:
    return value if isinstance(value, Html) else escape(f"{value:,}" if isinstance(value, int) else str(value))
