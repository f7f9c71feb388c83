"""LogView: the newest log lines of a run, filtered by rank, level and text."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from html import escape

import anywidget
import ipywidgets as w
import traitlets

from ..run.watch import LogLine
from .cell import receive_while_busy
from .markup import note
from .static_files import follow_module

MAX_SHOWN_LINES = 300
MAX_SHOWN_CHARACTERS = 40_000
"""Limits of what is shown at a time, so that no log can fill the browser's memory."""
MAX_KEPT_LINES = 5000
"""Lines that the filters reach; older ones are in the run folder."""

ERROR, WARNING, OTHER = 2, 1, 0
LEVELS = (("all levels", OTHER), ("warnings and errors", WARNING), ("errors", ERROR))
_ERROR = re.compile(r"error|exception|traceback|critical|fatal", re.IGNORECASE)
_WARNING = re.compile(r"warn", re.IGNORECASE)


class Follower(anywidget.AnyWidget):
    """Lets go of the newest line when a person scrolls up, and takes hold of it again at the end."""

    follow = traitlets.Bool(True).tag(sync=True)

    def __init__(self) -> None:
        self._esm = follow_module()
        super().__init__()


def level_of(text: str) -> int:
    """Return how bad a line is, by its words."""
    if _ERROR.search(text):
        return ERROR
    return WARNING if _WARNING.search(text) else OTHER


class LogView(w.VBox):
    """Lines of all ranks, the newest at the bottom, with filters. Threads may add and draw.

    While a person looks at older lines, they stand still: new ones are counted, and shown again with *Follow*.
    """

    def __init__(self, ranks: int) -> None:
        self._lines: deque[LogLine] = deque(maxlen=MAX_KEPT_LINES)
        self._added, self._drawn = 0, -1  # lines so far, in all
        self._left_out = self._gaps = 0  # lines that were never taken in, and those that say so
        self._lock = threading.Lock()
        rank_options = [("all ranks", -1), *((f"rank {rank}", rank) for rank in range(ranks))]
        narrow = w.Layout(width="6.5em", flex="1 1 6.5em", min_width="0", margin="0")
        self.rank = w.Dropdown(options=rank_options, tooltip="Show lines of this rank", layout=narrow)
        self._level = w.Dropdown(options=LEVELS, tooltip="Show lines of this level", layout=narrow)
        self.search = w.Text(placeholder="search", tooltip="Show lines with this text", layout=narrow)
        controls: list[w.Widget] = [self.rank, self._level, self.search]
        for control in controls:
            control.observe(lambda _: self.draw(refiltered=True), "value")
        self.follow = w.Checkbox(True, description="Follow", indent=False, layout=w.Layout(width="auto"))
        self._follower = Follower()
        w.link((self._follower, "follow"), (self.follow, "value"))
        self.follow.observe(lambda change: self.draw(refiltered=True) if change.new else None, "value")
        self._note, self._text = w.HTML(), w.HTML()
        # A box that is laid out from its bottom keeps the newest line in view.
        layout = w.Layout(height="20em", overflow="auto", flex_flow="column-reverse", flex="0 0 auto")
        layout.border, layout.padding = "1px solid #78787866", "4px 8px"
        box = w.Box([self._text], layout=layout)
        box.add_class("mm-log-box")
        head = w.HBox([*controls, self.follow], layout=w.Layout(flex_flow="row wrap", grid_gap="2px 6px"))
        # Where anywidget is missing, a broken icon would stand there.
        unseen = w.Box([self._follower], layout=w.Layout(display="none"))
        super().__init__([head, box, self._note, unseen])
        self.add_class("mm-logs")
        receive_while_busy(self)

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
            added = self._added
            if not self.follow.value and not refiltered:
                self._note.value = note(f"{added - self._drawn:,} newer lines: press Follow")
                return
            self._drawn = added
            lines, left_out, gaps = list(self._lines), self._left_out, self._gaps
        rows = self._rows(lines)
        log = "\n".join(reversed(rows))
        self._text.value = f'<div class="jp-RenderedText"><pre class="mm-log">{log}</pre></div>'
        words = f"{len(rows):,} of {added - gaps + left_out:,} lines"
        if left_out:
            words += f"; {left_out:,} of them were not read: the files in logs/ of the run folder have all"
        self._note.value = note(words)

    def _rows(self, lines: Sequence[LogLine]) -> list[str]:
        """Return the lines that the filters let through as escaped HTML, the newest first, as many as are shown."""
        rank, level, search = self.rank.value, self._level.value, self.search.value.casefold()
        rows: list[str] = []
        characters = 0
        for line in reversed(lines):
            if rank not in (-1, line.rank) or search not in line.text.casefold():
                continue
            line_level = level_of(line.text)
            if line_level < level:
                continue
            characters += len(line.text)
            if len(rows) == MAX_SHOWN_LINES or characters > MAX_SHOWN_CHARACTERS:
                break
            text = escape(line.text)
            if line_level > OTHER:
                text = f'<b class="mm-level-{line_level}">{text}</b>'
            rows.append(f'<span class="mm-quiet">{line.rank} │</span> {text}')
        return rows
