"""LogView: the newest log lines of a run, filtered by rank and text."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from html import escape

import ipywidgets as w

from ..run.watch import LogLine
from .markup import note

MAX_SHOWN_LINES = 300
MAX_SHOWN_CHARACTERS = 100_000
"""Limits of what is shown at a time, so that no log can fill the browser's memory."""
MAX_KEPT_LINES = 5000
"""Lines that the filters reach; older ones are in the run folder."""


class LogView(w.VBox):
    """Lines of all ranks, the newest at the bottom, with filters. Threads may add and draw."""

    def __init__(self, ranks: int) -> None:
        self._lines: deque[LogLine] = deque(maxlen=MAX_KEPT_LINES)
        self._added, self._drawn = 0, -1  # lines so far, in all
        self._left_out = self._gaps = 0  # lines that were never taken in, and those that say so
        self._lock = threading.Lock()
        narrow = w.Layout(width="11em")
        rank_options = [("all ranks", -1), *((f"rank {rank}", rank) for rank in range(ranks))]
        self._rank = w.Dropdown(options=rank_options, tooltip="Show lines of this rank", layout=narrow)
        self._search = w.Text(placeholder="search the log", tooltip="Show lines with this text", layout=narrow)
        controls = [self._rank, self._search]
        for control in controls:
            control.observe(lambda _: self.draw(refiltered=True), "value")
        self._note, self._text = w.HTML(), w.HTML()
        # A box that is laid out from its bottom keeps the newest line in view.
        layout = w.Layout(height="20em", overflow="auto", flex_flow="column-reverse", flex="0 0 auto")
        layout.border, layout.padding = "1px solid #78787866", "4px 8px"
        box = w.Box([self._text], layout=layout)
        super().__init__([w.HBox(controls, layout=w.Layout(flex_flow="row wrap")), self._note, box])

    def add(self, lines: Sequence[LogLine], *, left_out: int = 0, gaps: int = 0) -> None:
        """Take lines in; `draw` shows them. left_out, gaps: as the reader counts them so far."""
        with self._lock:
            self._added += len(lines)
            self._left_out, self._gaps = left_out, gaps
            self._lines.extend(lines)

    def draw(self, *, refiltered: bool = False) -> None:
        """Bring the page up to date; does nothing if it is. refiltered: a filter has changed."""
        with self._lock:
            if self._added == self._drawn and not refiltered:
                return
            added = self._drawn = self._added
            lines, left_out, gaps = list(self._lines), self._left_out, self._gaps
        rank, search = self._rank.value, self._search.value.casefold()
        rows: list[str] = []  # as escaped HTML, the newest first
        characters = 0
        for line in reversed(lines):
            if rank not in (-1, line.rank) or search not in line.text.casefold():
                continue
            characters += len(line.text)
            if len(rows) == MAX_SHOWN_LINES or characters > MAX_SHOWN_CHARACTERS:
                break
            rows.append(f'<span class="mm-quiet">{line.rank} │</span> {escape(line.text)}')
        log = "\n".join(reversed(rows))
        self._text.value = f'<div class="jp-RenderedText"><pre class="mm-log">{log}</pre></div>'
        words = f"{len(rows):,} of {added - gaps + left_out:,} lines"
        if left_out:
            words += f"; {left_out:,} of them were not read: the files in logs/ of the run folder have all"
        self._note.value = note(words)
