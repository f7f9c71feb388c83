"""LogView: the newest log lines of a run, filtered, searched, held still."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from html import escape

import ipywidgets as w

from ..watch import COLOR, LogLine, level
from .style import note

SHOWN = 300
"""Lines that are shown at once, if they are not too long."""
KEPT = 5000
"""Lines that filters and the search can reach; older ones are in the run folder."""
LETTERS = 100_000
"""Most that is shown, and a tenth of the most that is kept, so that no log can fill the memory of browser or kernel."""
_SGR = re.compile(r"\x1b\[([0-9;]*)m")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
LEVELS = {"every line": (), "warnings, errors": ("warning", "error"), "errors": ("error",)}


class LogView(w.VBox):
    """Lines of all ranks, newest at the bottom, and what chooses among them. Threads may add and draw."""

    def __init__(self, ranks: int) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEPT)
        self._letters = 0
        self._total, self._drawn = 0, -1
        self._held: Sequence[LogLine] | None = None
        self._lock = threading.Lock()
        narrow = w.Layout(width="11em")
        self._rank = w.Dropdown(options=[("all ranks", -1), *((f"rank {r}", r) for r in range(ranks))], layout=narrow)
        self._level = w.Dropdown(options=list(LEVELS), layout=narrow)
        self._search = w.Text(placeholder="search the log", layout=w.Layout(width="13em"))
        self._follow = w.ToggleButton(value=True, description="Follow", icon="arrow-down", layout=w.Layout(width="8em"))
        self.first = w.Button(description="First error", icon="bug", layout=w.Layout(width="9em"))
        for part, words in (
            (self._rank, "Whose lines to show"),
            (self._level, "Which lines to show"),
            (self._search, "Show only lines that hold this text"),
            (self._follow, "Pressed: the newest line stays in view. Not pressed: nothing moves"),
            (self.first, "Look through the whole logs for the first error"),
        ):
            part.tooltip = words
        self._note, self._text = w.HTML(), w.HTML()
        for part in (self._rank, self._level, self._search):
            part.observe(lambda _: self._choose(), "value")
        self._follow.observe(lambda _: self._choose(), "value")
        # a box that is laid out from its bottom keeps the newest line in view
        look = {"height": "20em", "overflow": "auto", "flex_flow": "column-reverse", "flex": "0 0 auto"}
        self._box = w.Box([self._text], layout=w.Layout(**look, border="1px solid #78787866", padding="4px 8px"))
        tools = [self._rank, self._level, self._search, self._follow, self.first]
        super().__init__([w.HBox(tools, layout=w.Layout(flex_flow="row wrap")), self._note, self._box])

    def add(self, lines: Sequence[LogLine]) -> None:
        """Take lines in; they are drawn by `draw`."""
        with self._lock:
            self._total += len(lines)
            for line in lines[-KEPT:]:
                if len(self._lines) == KEPT:
                    self._letters -= len(self._lines[0].text)
                self._lines.append(line)
                self._letters += len(line.text)
            while self._letters > 10 * LETTERS:
                self._letters -= len(self._lines.popleft().text)

    def hold(self, lines: Sequence[LogLine], words: str) -> None:
        """Show these lines in place of the newest, until somebody presses Follow."""
        self._follow.value = False
        self._held = lines
        self._box.layout.flex_flow = "column"  # from its first line on
        self._text.value, self._note.value = _html(lines), note(words)

    def draw(self) -> None:
        """Bring the page up to date; costs nothing where it is."""
        with self._lock:
            if self._total == self._drawn:
                return
            total = self._drawn = self._total
            lines = list(self._lines) if self._follow.value else []
        if not self._follow.value:
            if self._held is None:
                self._note.value = note(f"paused; {total:,} lines by now")
            return
        chosen = self._chosen(lines)
        shown, letters = len(chosen), 0
        while shown and letters < LETTERS and len(chosen) - shown < SHOWN:
            shown -= 1
            letters += len(chosen[shown].text)
        self._text.value = _html(chosen[shown:])
        words = f"{len(chosen) - shown:,} of {total:,} lines"
        if len(lines) < total and len(chosen) < len(lines):
            words += f"; filters reach the newest {len(lines):,}"
        self._note.value = note(words)

    def _choose(self) -> None:
        with self._lock:
            self._drawn = -1
            self._held = None if self._follow.value else self._held
            self._box.layout.flex_flow = "column-reverse" if self._held is None else "column"
        if self._held is None:
            self.draw()

    def _chosen(self, lines: list[LogLine]) -> list[LogLine]:
        rank, levels, words = self._rank.value, LEVELS[self._level.value], self._search.value.casefold()
        if rank >= 0:
            lines = [line for line in lines if line.rank == rank]
        if levels:
            lines = [line for line in lines if level(line.text) in levels]
        if words:
            lines = [line for line in lines if words in COLOR.sub("", line.text).casefold()]
        return lines


def _html(lines: Sequence[LogLine]) -> str:
    """In the class in which JupyterLab and Notebook color what ANSI has colored."""
    return '<div class="jp-RenderedText"><pre class="mm-log">' + "\n".join(map(_row, lines)) + "</pre></div>"


@lru_cache(1024)
def _row(line: LogLine) -> str:
    """A log line as HTML: its level marked, its colors kept, everything else escaped."""
    kind = level(line.text)
    text = _colored(line.text) if "\x1b" in line.text else escape(line.text)
    return f'<span class="mm-quiet">{line.rank} │</span> ' + (f'<b class="mm-is-{kind}">{text}</b>' if kind else text)


def _colored(text: str) -> str:
    """The colors that JupyterLab has classes for, as it names them; other graphics are left out. (nbconvert does this
    too, but takes a second to import.)"""
    pieces = _SGR.split(text)
    html = escape(pieces[0])
    classes: dict[int | str, str] = {}
    for codes, words in zip(pieces[1::2], pieces[2::2], strict=True):
        for code in (int(c or 0) for c in codes.split(";")) if not codes.startswith(("38;", "48;")) else ():
            if code == 0:
                classes.clear()
            elif code in (1, 4):
                classes[code] = {1: "ansi-bold", 4: "ansi-underline"}[code]
            elif (place := code // 10) in (3, 4, 9, 10) and code % 10 < 8:
                part = "fg" if place in (3, 9) else "bg"
                classes[part] = f"ansi-{_NAMES[code % 10]}{'-intense' * (place > 4)}-{part}"
        html += f'<span class="{" ".join(classes.values())}">{escape(words)}</span>' if classes else escape(words)
    return html
