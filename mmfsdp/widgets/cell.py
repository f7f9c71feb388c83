"""A widget that stands in a cell: style sheets, input while a cell runs, cleanup when the cell runs again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from .style import STYLE, WIDGET_STYLE

import_lock = threading.RLock()
"""Hold this to import torch or transformers in a thread: transformers' lazy modules break when two threads import."""

_widgets_of_cell: dict[tuple[str, type], tuple[str, list[CellWidget]]] = {}
"""By cell and class: the newest execution of the cell, and the widgets that it made."""


class CellWidget(w.VBox):
    """A widget with its style sheets, whose input takes effect while a cell runs."""

    def __init__(self, children: Sequence[w.Widget], **traits: Any):
        sheets = w.HTML(STYLE + WIDGET_STYLE, layout=w.Layout(display="none"))
        super().__init__([sheets, *children], **traits)
        self.add_class("mm-widget")
        receive_while_busy(self)

    def close(self) -> None:
        """Remove it, with everything inside, from the page and from the kernel."""
        close_all(self)

    def replace_older(self) -> None:
        """Close what an earlier execution of this cell made: nobody can see it any more.

        Widgets that follow the older one follow this one, by its trait `successor`, if it has one.
        """
        cell, execution = _current_cell()
        if not cell:
            return
        previous_execution, widgets = _widgets_of_cell.get((cell, type(self)), (execution, []))
        if previous_execution == execution:
            widgets.append(self)
        else:
            for older in widgets:
                if older.has_trait("successor"):
                    older.successor = self
                older.close()
            widgets = [self]
        _widgets_of_cell[cell, type(self)] = (execution, widgets)


def receive_while_busy(widget: w.Widget) -> None:
    """Let input of a widget, and of all inside it, take effect while a cell runs.

    JupyterLab 4.4 and ipykernel 7 handle widget messages in a subshell, beside the one that runs cells. Since 7.4
    ipykernel routes them back to the shell that made the widget, without a public switch; remove this when it has one.
    """
    if hasattr(widget.comm, "_reply_subshell_for"):
        widget.comm._reply_subshell_for = lambda data, default: default
    if isinstance(widget, w.Box):
        widget.observe(_receive_in_new_children, "children")
        for child in widget.children:
            receive_while_busy(child)


def _receive_in_new_children(change: Any) -> None:
    for child in change.new:
        if child not in change.old:
            receive_while_busy(child)


def close_all(widget: Any) -> None:
    """Close a widget and all inside it, in the browser and in the kernel."""
    for child in getattr(widget, "children", ()):
        if isinstance(child, CellWidget):
            child.close()
        else:
            close_all(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, w.Widget):
            part.close()
    w.Widget.close(widget)


def _current_cell() -> tuple[str, str]:
    """Return (id of the cell, id of this execution); empty outside notebooks and where the front end names no cells."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    return parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", "")
