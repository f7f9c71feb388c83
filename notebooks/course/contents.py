"""The table of contents: every notebook with its minutes, and how far this user has come."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
EXERCISE = re.compile(r'check\("(\d\d\.[\w-]+)"')


def contents() -> Any:
    """All notebooks as a table, with links and this user's progress."""
    from IPython.display import HTML

    from .checks import progress

    done = progress()
    rows = "".join(_row(path, done) for path in sorted(HERE.glob("[0-9][0-9]_*.ipynb")))
    words = "<th>minutes (estimates)</th><th>exercises passed</th>"
    head = f"<tr><th></th><th style='text-align:left'>notebook</th>{words}</tr>"
    return HTML(f"<table>{head}{rows}</table>")


def exercises(path: Path) -> list[str]:
    """Names of the exercises of a notebook, in their order."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return list(dict.fromkeys(EXERCISE.findall(text)))


def _row(path: Path, done: set[str]) -> str:
    book = json.loads(path.read_text(encoding="utf-8"))
    title = "".join(book["cells"][0]["source"]).splitlines()[0].lstrip("# ")
    names = exercises(path)
    count = sum(name in done for name in names)
    state = f"{count} of {len(names)}{' ✓' if count == len(names) else ''}" if names else "–"
    minutes = re.search(r"about (\d+) minutes", "".join(book["cells"][0]["source"]))[1]
    link = f"<a href='{escape(path.name)}'>{escape(title)}</a>"
    return f"<tr><td>{path.name[:2]}</td><td style='text-align:left'>{link}</td><td>{minutes}</td><td>{state}</td></tr>"
