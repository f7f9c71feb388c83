"""DataLook: the path of a person's data, and what is there: records, three of the pictures, the first bad record."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ..params import DataSource, ParamError, RunParams
from .cell import import_lock
from .controls import Control
from .markup import error_note, note

if TYPE_CHECKING:
    from ..data.batch import Sample
    from ..data.sources import Splits

SHOWN = 3
THUMBNAIL = 40
"""Pixels of the longer side."""
MAX_TEXT = 60
OWN_READER = "read by your own code: press Try beside data.reader in All choices"
IMAGE_SIZE = 64
"""Pixels of generated pictures."""


class DataLook(Control):
    """A path that is looked at, in a thread, when it is typed; without one, the demo's generated pictures."""

    def __init__(self, *, take: Callable[[dict[str, Any]], None]):
        """take: called with the parameters of the data that were found, by their dotted names."""
        self._path = w.Text(description="your data", placeholder="folder, file or org/name", continuous_update=False)
        self._path.tooltip = "data.path"
        self._look = w.HTML()
        self._take = take
        self._shown: Any = None  # the data that are looked at
        self._thread: threading.Thread | None = None
        super().__init__("data.path", [self._path, self._look], lambda name, value: self._typed(value))
        self._path.observe(lambda change: self.typed(change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Show the path of these parameters, and look at their data if they are others than before."""
        self._path.value = value or ""
        if params.data == self._shown:
            return
        self._shown = params.data
        if params.data.reader is not None:  # a person's code runs when they ask for it
            self._start(lambda: setattr(self._look, "value", note(OWN_READER)))
        else:
            self._start(lambda: self._look_at(params))

    def wait(self) -> str:
        """Wait until what was typed is looked at, and return the HTML that is shown."""
        thread = self._thread
        if thread is not None:
            thread.join()
        return self._look.value

    def _typed(self, path: str) -> None:
        if not path.strip():
            self._take({"data.source": DataSource.SHAPES.value, "data.path": None, "data.pictures": None})
        else:
            self._start(lambda: self._detect(path.strip()))

    def _start(self, work: Callable[[], None]) -> None:
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                work()
            except Exception as error:  # the thread ends here: the error is shown
                self._look.value = error_note(error)

        self._look.value = note("looking at the data…", role="status")
        self._thread = threading.Thread(target=run, daemon=True, name="data")
        self._thread.start()

    def _detect(self, path: str) -> None:
        """Find out which source reads a path, and take it."""
        with import_lock:
            from ..data.detect import detect

        found = detect(path)
        look = look_html(found.splits)
        data = found.params
        values = {"data.source": data.source.value, "data.path": data.path, "data.pictures": data.pictures}
        try:
            self._take(values)
            self._look.value = look
        except ParamError as error:
            self._look.value = look + error_note(error)

    def _look_at(self, params: RunParams) -> None:
        """Show the data of parameters as they stand."""
        with import_lock:
            from ..data import open_sources

        splits = list(open_sources(params.data, image_size=IMAGE_SIZE).values())
        self._look.value = "".join(look_html(each) for each in splits[:SHOWN])


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
