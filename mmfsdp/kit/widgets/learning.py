"""Watch it learn: the same held-out pictures with their captions of each evaluation, and a slider through time.

The HTML is whole without a script: the newest captions stand. learning.js moves the slider, in a report and in a cell.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w

from ...params.in_words import size
from ..run.files.folder import is_inside, read_file
from ..run.files.watched_file import Watched, pictures_path, read_watched, rows_path
from .markup import note, shown
from .static_files import learning_script

MAX_STOPS = 60
"""Evaluations that the slider stops at; of more, some between the first and the last."""
MAX_PICTURES = 24
MAX_STRIPS = 6
"""Runs of a comparison whose pictures are shown."""
MAX_PICTURE_BYTES = 10 << 20

_MODULE = """
export default {
  render({ el }) {
    let learning = null, drawn = null, closed = false;
    const start = () => {
      if (closed) return;
      const root = el.closest(".mm-widget");
      if (!root) return requestAnimationFrame(start); // it is not in the page yet
      learning = mmLearning(root, strip => strip.closest(".mm-widget") === root);
      drawn = new MutationObserver(() => learning.restore());
      drawn.observe(root, { childList: true, subtree: true });
    };
    start();
    return () => { closed = true; drawn?.disconnect(); learning?.close(); };
  },
};
"""


class LearningSliders(anywidget.AnyWidget):
    """Moves the sliders of `learning_html` in the widget around it."""

    def __init__(self) -> None:
        self._esm = learning_script() + _MODULE
        super().__init__()


def hidden_sliders() -> w.Box:
    """Return a part of a CellWidget that nobody sees, and that moves the sliders in it."""
    return w.Box([LearningSliders()], layout=w.Layout(display="none"))


class LearningStrip:
    """The watched pictures of a run as HTML, which is made again only after the run has written something."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._seen: object = None
        self._html = ""

    def html(self) -> str:
        """Return the pictures with the captions so far; "" without any."""
        newest = [_stat(path(self._folder)) for path in (pictures_path, rows_path)]
        if newest != self._seen:
            self._seen, self._html = newest, learning_html(self._folder)
        return self._html


def _stat(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:  # not there yet; or a link to itself
        return 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns


def learning_html(folder: Path, *, name: str = "") -> str:
    """Return the watched pictures of a run with a slider; "" where it has none. name: of the run, among others."""
    pictures, all_rows = read_watched(folder)
    if not all_rows or not pictures:
        return ""
    rows = _stops(all_rows)
    times = [f"step {row['step']:,}" for row in rows]
    cards = ""
    for index, picture in enumerate(pictures[:MAX_PICTURES]):
        truth = picture.get("truth", "?")
        said = [marked(row["captions"][index], truth) for row in rows]
        words = f'<span data-said="{escape(json.dumps(said, ensure_ascii=False))}">{escape(said[-1])}</span>'
        cards += (
            f'<figure class="mm-card">{picture_tag(folder, picture)}<figcaption>{words}'
            f'<br><span class="mm-quiet">truth: {escape(truth)}</span></figcaption></figure>'
        )
    of_run = f" of {shown(name)}" if name else ""
    # JupyterLab would take the arrow keys to move between cells.
    slider = (
        f'<input type="range" hidden min="0" max="{len(rows) - 1}" step="1" value="{len(rows) - 1}" '
        f'aria-label="evaluation{of_run}" aria-valuetext="{times[-1]}" data-lm-suppress-shortcuts="true" />'
    )
    return (
        f'<div class="mm-learning" data-learning="{shown(name)}" data-times="{escape(json.dumps(times))}">'
        f'<div class="mm-learning-head"><span>what the model says, <b data-time>{times[-1]}</b></span>{slider}</div>'
        f'<div class="mm-cards">{cards}</div></div>'
    )


def _stops(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most MAX_STOPS rows, evenly, with the first and the last."""
    if len(rows) <= MAX_STOPS:
        return list(rows)
    stride = (len(rows) - 1) / (MAX_STOPS - 1)
    return [rows[round(stride * index)] for index in range(MAX_STOPS)]


def learning_section(folder: Path) -> str:
    """Return the watched pictures of a run for a page of its own, with what they took and the script; "" without."""
    html = learning_html(folder)
    return html + took(read_watched(folder)) + learning_tag() if html else ""


def took(watched: Watched) -> str:
    """Return what all evaluations of the watched pictures took, in a line; "" where that is not known."""
    known = [row for row in watched.rows if "seconds" in row and "wire_bytes" in row]
    if not known:
        return ""
    seconds, sent = sum(row["seconds"] for row in known), sum(row["wire_bytes"] for row in known)
    return note(
        f"Captioned {len(known)} times: {seconds:,.1f} s, in which rank 0 sent {size(sent)}. Neither counts in a step. "
        "train.eval_pictures sets the number of pictures."
    )


def learning_of_runs(runs: Sequence[tuple[str, Path]]) -> str:
    """Return the watched pictures of several runs, each with its name; "" where none has any."""
    html, strips = "", 0
    for name, folder in runs:
        strip = learning_html(folder, name=name) if strips < MAX_STRIPS else ""
        if strip:
            strips += 1
            html += f"<h4>{shown(name)}</h4>{strip}"
    if strips == MAX_STRIPS < len(runs):
        html += note(f"Of the first {MAX_STRIPS} runs with such pictures.")
    return f'<div class="mm-learning-runs">{html}</div>' if html else ""


def learning_tag() -> str:
    """Return the script element that moves the sliders of a page, which stands after them."""
    return f"<script>{{ {learning_script()}\nmmLearning(document.body); }}</script>"


def marked(caption: str, truth: str) -> str:
    """Return a caption after a sign that says if it is the truth, word for word."""
    return f"{'✓' if caption == truth else '✗'} {caption}"


def picture_tag(folder: Path, row: Mapping[str, Any]) -> str:
    """Return the picture of a row (image, truth) as an element that holds it; "" for a file from elsewhere."""
    path = folder / row.get("image", "")
    if path.suffix != ".png" or not is_inside(path, folder) or not path.is_file():
        return ""
    data = base64.b64encode(read_file(path, limit=MAX_PICTURE_BYTES)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(row.get("truth", "?"))}">'
