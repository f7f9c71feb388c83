"""DataLook: the path of a person's data, and what is there: records, three of the pictures, the first bad record."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ...params import DataSource, ParamError, RunParams
from .cell import import_lock
from .controls import Control
from .markup import note
from .worker import Worker

if TYPE_CHECKING:
    from ..data.batch import Sample
    from ..data.open_sources import Splits

SHOWN = 3
THUMBNAIL = 40
"""Pixels of the longer side."""
MAX_TEXT = 60
OWN_READER = "read by your own code: press Try beside data.reader in All choices"
IMAGE_SIZE = 64
"""Pixels of generated pictures."""
LOOKING = "looking at the data…"


class NotYet(ParamError):
    """The reason why a choice cannot be taken yet; not a mistake."""


class DataLook(Worker, Control):
    """A path that is looked at, in a thread, when it is typed; without one, the demo's generated pictures."""

    def __init__(self, *, take: Callable[[dict[str, Any]], None], refuse: Callable[[ParamError | None], None]):
        """Begin with no path.

        take: called with the parameters of the data that were found, by their dotted names. refuse: called with the
        reason why what stands in the field is not what would be trained on, and with None once it is.
        """
        self.path = w.Text(description="your data", placeholder="folder, file or org/name", continuous_update=False)
        self.path.tooltip = "data.path"
        self._look = self.error_line = w.HTML()
        self._take, self._refuse = take, refuse
        self._shown: Any = None  # the data that are looked at
        super().__init__("data.path", [self.path, self._look], lambda name, value: self._typed(value))
        self.path.observe(lambda change: self.typed(change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Show the path of these parameters, and look at their data if they are others than before."""
        self.path.value = value or ""
        if params.data == self._shown:
            return
        self._shown = params.data
        if params.data.reader is not None:  # a person's code runs when they ask for it
            self._start("look", lambda: note(OWN_READER), self._show_look)
        else:
            self._start("look", lambda: look_at(params), self._show_look)

    def why_idle(self, params: RunParams) -> str:
        """Return "": a path chooses the source that reads it."""
        return ""

    def wait(self) -> str:
        """Wait until what was typed is looked at, and return the HTML that is shown."""
        self.wait_for_work()
        return self.words.value + self._look.value

    def _typed(self, path: str) -> None:
        self._shown = None  # what is below the field is of this path now
        if path.strip():
            self._refuse(NotYet(self.name, LOOKING))
            self._start("detect", lambda: detected(path.strip()), self._show_detected)
        else:
            generated = {"data.source": DataSource.SHAPES.value, "data.path": None, "data.pictures": None}
            self._start("detect", lambda: (generated, ""), self._show_detected)

    def _start(self, name: str, function: Callable[[], Any], show: Callable[[Any], None]) -> None:
        self._look.value = note(LOOKING, role="status")
        self.work(name, function, show=show)

    def _show_look(self, look: str) -> None:
        self._look.value = look

    def _show_detected(self, values_and_look: tuple[dict[str, Any], str]) -> None:
        """Take the data that were found at a path, and show them."""
        values, look = values_and_look
        self._look.value = look
        self._refuse(None)
        self._take(values)

    def show_error(self, name: str, error: Exception) -> None:
        """Refuse a path that cannot be trained on; of the data that are chosen already, say what is wrong."""
        if name == "detect":
            words = error.message if isinstance(error, ParamError) else str(error)
            self._look.value = ""
            self._refuse(ParamError(self.name, words))
        else:
            super().show_error(name, error)

    def mark(self, error: str) -> None:
        """Show a mistake below the input, but not while it is looked at."""
        super().mark("" if error == LOOKING else error)


def detected(path: str) -> tuple[dict[str, Any], str]:
    """Return the parameters of the source that reads a path, by dotted name, and what it has as HTML."""
    with import_lock:
        from ..data.sources.detect import detect

    found = detect(path)
    data = found.params
    values = {"data.source": data.source.value, "data.path": data.path, "data.pictures": data.pictures}
    return values, look_html(found.splits)


def look_at(params: RunParams) -> str:
    """Return what the sources of these parameters have as HTML."""
    with import_lock:
        from ..data import open_sources

    splits = list(open_sources(params.data, image_size=IMAGE_SIZE).values())
    return "".join(look_html(each) for each in splits[:SHOWN])


def look_html(splits: Splits) -> str:
    """Return what a source has: records, the first pictures with their texts, the first bad record and why."""
    from ..data.batch import Sample

    train, heldout = splits["train"], splits["heldout"]
    samples = islice((item for item in train.loaded() if isinstance(item, Sample)), SHOWN)
    cards = _cards(list(samples))
    words = "drawn on the fly, without end"
    if train.length is not None:
        words = f"{train.length:,} records train"
        if heldout.length is not None:
            words += f", {heldout.length:,} are held out"
    html = f'<div class="mm-look">{cards}</div>{note(words)}'
    skipped = list(train.skipped.items())
    if skipped:
        name, reason = skipped[0]
        words = f"{len(skipped):,} records cannot be used, such as" if len(skipped) > 1 else "A record cannot be used:"
        html += note(f"{words} {name}, which {reason}", "warning")
    return html


def _cards(samples: list[Sample]) -> str:
    """Return the pictures of samples, each with its text as a tooltip, and the first one's text beside them."""
    html = ""
    for sample in samples:
        text = _shortened(sample.text)
        if sample.images:
            image = sample.images[0].convert("RGB")
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            file = io.BytesIO()
            image.save(file, "PNG")
            data = base64.b64encode(file.getvalue()).decode()
            html += f'<img src="data:image/png;base64,{data}" alt="{escape(text)}" title="{escape(text)}">'
    if samples:
        text = _shortened(samples[0].text)
        html += f'<span title="text of the first: {escape(text)}">{escape(text)}</span>'
    return html


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
