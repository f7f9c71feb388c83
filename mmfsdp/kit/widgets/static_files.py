"""Scripts and style sheets that the package brings as files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"


@cache
def script() -> str:
    """Return uPlot and the function `mmCharts` as one JavaScript text, for a page or as part of a module."""
    return _joined("uPlot.iife.min.js", "charts.js")


@cache
def chart_sheet() -> str:
    """Return the style sheets of the charts."""
    return _joined("uPlot.min.css", "charts.css")


@cache
def cockpit_sheet() -> str:
    """Return the style sheet of the cockpit and of a run's strip."""
    return _joined("cockpit.css")


@cache
def labels_module() -> str:
    """Return the module that names inputs for screen readers."""
    return _joined("labels.js")


@cache
def folds_module() -> str:
    """Return the module that keeps open what a person has unfolded."""
    return _joined("folds.js")


@cache
def learning_script() -> str:
    """Return the function `mmLearning`, which moves sliders through captions, for a page or as part of a module."""
    return _joined("learning.js")


@cache
def follow_module() -> str:
    """Return the module by which a log follows its newest line."""
    return _joined("follow.js")


@cache
def ways_module() -> str:
    """Return the module that says which way was pressed in the picture of all ways."""
    return _joined("ways.js")


@cache
def play_heads_module() -> str:
    """Return the module that moves the play heads of a widget."""
    return _joined("play_head.js", "play_heads.js")


@cache
def play_head_script() -> str:
    """Return the script element that moves the play heads of a page; it stands after them."""
    start = "for (const plan of document.querySelectorAll('.mm-plan')) mmPlayHead(plan);"
    return f"<script>(() => {{ {_joined('play_head.js')}\n{start} }})();</script>"


def _joined(*names: str) -> str:
    texts = []
    for name in names:
        text = (STATIC / name).read_text(encoding="utf-8")
        texts.append(_small_sheet(text) if name.endswith(".css") else _small(text))
    return "\n".join(texts)


def _small(text: str) -> str:
    """Return a script or sheet without indentation and comments, but for licences: every page holds it.

    None of ours has a text of several lines, in which indentation would count, or two slashes and a space in a text.
    """
    lines = [re.sub(r"(^|\s)(// .*|/\* .* \*/)$", "", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)


def _small_sheet(text: str) -> str:
    """Return a style sheet without comments and without spaces that mean nothing; ours has no texts."""
    return re.sub(r"([;:,{]) | (?=[{}])", r"\1", _small(text))
