"""A widget that stands in a cell: style sheets, input while a cell runs, cleanup when the cell runs again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import anywidget
import ipywidgets as w
import traitlets

from .static_files import cockpit_sheet, folds_module, labels_module, play_heads_module
from .style import STYLE, WIDGET_STYLE
from .worker import Worker

ABSENT_AFTER_S = 10.0
"""Seconds without an answer after which nobody is taken to watch."""

import_lock = threading.RLock()
"""Hold this to import torch or transformers in a thread: transformers' lazy modules break when two threads import."""

_widgets_of_cell: dict[tuple[str, type], tuple[str, list[CellWidget]]] = {}
"""By cell and class: the newest execution of the cell, and the widgets that it made."""


class InputLabels(anywidget.AnyWidget):
    """Names the inputs of the widget around it for screen readers, where ipywidgets does not."""

    def __init__(self) -> None:
        self._esm = labels_module()
        super().__init__()


class Folds(anywidget.AnyWidget):
    """Keeps open what a person has unfolded in the HTML of the widget around it, when that is drawn once more.

    What may be drawn again has the attribute data-fold: a name that says what it is, whatever it shows now.
    """

    folds = traitlets.Dict().tag(sync=True)
    """Name -> True for what a person has unfolded, False for what they have folded; the page writes it."""

    def __init__(self) -> None:
        self._esm = folds_module()
        super().__init__()


class PlayHeads(anywidget.AnyWidget):
    """Moves the play heads in the HTML of the widget around it; one that is drawn once more stays where it was."""

    def __init__(self) -> None:
        self._esm = play_heads_module()
        super().__init__(layout=w.Layout(display="none"))


class CellWidget(w.VBox):
    """A widget with its style sheets, whose input takes effect while a cell runs.

    What a person unfolds in it stays open when it is drawn once more.
    """

    def __init__(self, children: Sequence[w.Widget], **traits: Any):
        self._folds = Folds()
        hidden = w.Box([InputLabels(), self._folds], layout=w.Layout(display="none"))
        super().__init__([_style_sheets(), *children, hidden], **traits)
        self.add_class("mm-widget")
        receive_while_busy(self)

    def close(self) -> None:
        """Remove it, with everything inside, from the page and from the kernel."""
        close_all(self)

    def replace_older(self) -> None:
        """Close what an earlier execution of this cell made: nobody can see it any more.

        Widgets that follow the older one follow this one, by its trait `successor`, if it has one.
        """
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
        cell, execution = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id", "")
        if not cell:  # outside notebooks, and where the front end names no cells
            return
        previous_execution, widgets = _widgets_of_cell.get((cell, type(self)), (execution, []))
        if previous_execution != execution:
            for older in widgets:
                if older.has_trait("successor"):
                    older.successor = self
                older.close()
            widgets = []
        _widgets_of_cell[cell, type(self)] = (execution, [*widgets, self])


_sheets: list[w.HTML] = []
"""The style sheets of all widgets of this kernel: one model with a view in each, so that a page gets them once."""


def _style_sheets() -> w.HTML:
    """Return the style sheets; made anew where somebody has closed all widgets."""
    if not _sheets or _sheets[0].comm is None:
        html = STYLE + WIDGET_STYLE + f"<style>{cockpit_sheet()}</style>"
        _sheets[:] = [w.HTML(html, layout=w.Layout(display="none"))]
    return _sheets[0]


class ViewerPresence:
    """Knows if a browser shows the page: of two hidden linked numbers, the browser copies the first into the second.

    Jupyter keeps every message that no browser fetches, so an update to nobody should be rare. While a cell runs,
    answers arrive only where `receive_while_busy` works.
    """

    def __init__(self) -> None:
        self.question, self.answer = w.IntText(), w.IntText()
        self._link = w.jsdlink((self.question, "value"), (self.answer, "value"))
        self.answer.observe(lambda _: self._answered(), "value")
        receive_while_busy(self.answer)
        self.answered_at = time.monotonic()
        self.returned = threading.Event()
        """Set when an answer comes after an absence."""

    @property
    def watching(self) -> bool:
        """True if the page answered recently."""
        return time.monotonic() - self.answered_at < ABSENT_AFTER_S

    def ask(self) -> None:
        """Send a question; the page answers by itself."""
        self.question.value += 1

    def close(self) -> None:
        """Remove the hidden widgets."""
        for part in (self._link, self.question, self.answer):
            close_all(part)

    def _answered(self) -> None:
        if not self.watching:
            self.returned.set()
        self.answered_at = time.monotonic()


def receive_while_busy(widget: w.Widget) -> None:
    """Let input of a widget, and of all inside it, take effect while a cell runs.

    JupyterLab 4.4 and ipykernel 7 handle widget messages in a subshell, next to the shell that runs cells. Since 7.4
    ipykernel routes them back to the shell that made the widget, without a public switch; remove this when it has one.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
    if isinstance(widget, w.Box):
        widget.observe(_children_changed, "children")
        for child in widget.children:
            receive_while_busy(child)


def _children_changed(change: Any) -> None:
    receive_while_busy(change.owner)  # doing so again changes nothing for the older children


def close_all(widget: Any) -> None:
    """Close a widget and all inside it, in the browser and in the kernel, and end their work."""
    if isinstance(widget, Worker):
        widget.end_work()
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if part in _sheets:
            continue  # others show it, too
        if isinstance(part, CellWidget):
            part.close()
        elif isinstance(part, w.Widget):
            close_all(part)
    w.Widget.close(widget)
