"""DataLook: the path of a person's data, and what is there: records, three of the pictures, what one should know."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from ...params import DataParams, DataSource, ParamError, RunParams
from ...params.findings import Finding
from .cell import import_lock
from .controls import Control
from .markup import note, shown
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
        self._shown: Any = None  # the choices whose data are looked at
        self._opened: tuple[DataParams, dict[str, Splits]] | None = None  # the newest data, and their sources
        super().__init__("data.path", [self.path, self._look], lambda name, value: self._typed(value))
        self.path.observe(lambda change: self.typed(change.new), "value")

    def fill(self, value: Any, params: RunParams) -> None:
        """Show the path of these parameters, and look at their data if they are others than before."""
        self.path.value = value or ""
        train, launch = params.train, params.launch
        choices = (params.data, params.model, train.batch_size, train.accumulation, launch.ranks)
        if choices == self._shown:
            return
        is_same_data = self._shown is not None and self._shown[0] == params.data
        self._shown = choices
        if not is_same_data:
            self._opened = None
        if params.data.reader is not None:  # a person's code runs when they ask for it
            self._start("look", lambda: note(OWN_READER), self._show_look)
        elif is_same_data and self._opened is not None:  # what is shown stays until there is something else
            self.work("look", lambda: self._look_at(params), show=self._show_look)
        else:
            self._start("look", lambda: self._look_at(params), self._show_look)

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

    def _look_at(self, params: RunParams) -> str:
        """Return what the sources of these parameters have as HTML, opened once for all choices with the same data."""
        if self._opened is None or self._opened[0] != params.data:
            self._opened = params.data, open_sources_of(params)
        return look_at(params, self._opened[1])

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


def open_sources_of(params: RunParams) -> dict[str, Splits]:
    """Return the sources of these parameters, opened. Raises ParamError as `open_sources`."""
    with import_lock:
        from ..data import open_sources

    return open_sources(params.data, image_size=IMAGE_SIZE)


def look_at(params: RunParams, sources: dict[str, Splits]) -> str:
    """Return what opened sources have as HTML, and what a person should know of it before a run."""
    with import_lock:
        from ..train.notices import notices
        from ..train.prepare import kept_model

        processor = None
        # Without rows to read there is no need for the model; where it cannot be built, the plan says why.
        with suppress(ParamError):
            if not all(source.source.takes.draws for source in params.data.sources().values()):
                _, processor = kept_model(params)
    html = "".join(look_html(each) for each in list(sources.values())[:SHOWN])
    return html + notices_html(notices(params, sources, processor))


def notices_html(found: Sequence[Finding]) -> str:
    """Return the notices on data as HTML: of several warnings their number and the beginning of the first, which
    unfolds to all, so that they leave room for the pictures beside or below. Errors and notes are never folded.
    """
    html: dict[str, list[str]] = {"error": [], "warning": [], "note": []}
    first_warning = ""
    for notice in found:
        if notice.level == "warning" and not first_warning:
            first_warning = notice.message
        html[notice.level].append(note(notice.message, "quiet" if notice.level == "note" else notice.level))
    warnings = html["warning"]
    if len(warnings) > 1:
        words = f"<b>{len(warnings)} warnings</b> <span>{shown(first_warning)}</span>"
        summary = f'<summary class="mm-warning">{words}</summary>'
        warnings = [f'<details class="mm-warnings" data-fold="warnings of data">{summary}', *warnings[1:], "</details>"]
    return "".join([*html["error"], *warnings, *html["note"]])


def look_html(splits: Splits) -> str:
    """Return what a source has: its records, and the first pictures with their texts."""
    from ..data.batch import Sample

    train, heldout = splits["train"], splits["heldout"]
    samples = islice((item for item in train.loaded() if isinstance(item, Sample)), SHOWN)
    cards = _cards(list(samples))
    words = "drawn on the fly, without end"
    if train.length is not None:
        words = f"{train.length:,} records train"
        if heldout.length is not None:
            words += f", {heldout.length:,} are held out"
    return f'<div class="mm-look">{cards}</div>{note(words)}'


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
