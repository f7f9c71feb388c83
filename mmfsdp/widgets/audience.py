"""Whether a browser is looking, and how it is heard while a cell runs. A server keeps what nobody fetches, so to nobody
little must be said."""

from __future__ import annotations

import threading
import time
from typing import Any

import ipywidgets as w

ASK = 5.0
"""Seconds between two questions."""
SPREAD = 60.0
"""After a silence of s seconds, updates come s / SPREAD seconds apart: so their number grows as its logarithm only."""


class Audience:
    """A number that the page hands back by itself: two widgets, linked within the browser, that are never shown.

    A kernel that is busy hears no answer either, but for `hear_at_once`; so silence makes a panel slower, not still. A
    page that comes back is heard at once.
    """

    def __init__(self) -> None:
        self._ask, self._answer = w.IntText(), w.IntText()
        self._link = w.jsdlink((self._ask, "value"), (self._answer, "value"))
        self._answer.observe(lambda _: self._hear(), "value")
        hear_at_once(self._answer)
        self._asked = self._heard = time.monotonic()
        self.back = threading.Event()
        """Set by an answer after a silence."""

    def pace(self, fastest: float) -> float:
        """Seconds that should lie between two updates now."""
        now = time.monotonic()
        silence = now - self._heard
        if now - self._asked > max(ASK, silence / SPREAD):
            self._asked = now
            self._ask.value += 1
        return max(fastest, (silence - 2 * ASK) / SPREAD)

    def close(self) -> None:
        """Forget the widgets."""
        for part in (self._link, self._ask, self._answer):
            part.close()

    def _hear(self) -> None:
        if time.monotonic() - self._heard > 3 * ASK:
            self.back.set()
        self._heard = time.monotonic()


def hear_at_once(widget: w.Widget) -> None:
    """Have what a person does with a widget, or within it, take effect while a cell runs, too, where that can be.

    JupyterLab from 4.4 on has a subshell of ipykernel 7 hear widgets; from 7.4 on ipykernel passes what they say on to
    the shell that made them all the same, which is the one that runs cells.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
    if isinstance(widget, w.Box):
        widget.observe(_hear_children, "children")
        for child in widget.children:
            hear_at_once(child)


def _hear_children(change: Any) -> None:
    for child in change.new:
        if child not in change.old:
            hear_at_once(child)
