"""How widgets look, and how those of a cell that runs again go."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as w

from ..plots.style import STYLE
from .audience import hear_at_once

LOOK = """<style>
.mm-form .mm-row {display: flex; flex-flow: row wrap; align-items: center; overflow: visible; gap: 0 .6em}
.mm-form .mm-row > .widget-inline-hbox, .mm-form .mm-row > .widget-textarea {width: 27em; max-width: 100%; flex: none}
.mm-form .mm-row > .widget-html {flex: 1 1 18em; min-width: 0; margin: 2px}
.mm-form .mm-row .widget-html-content {line-height: 1.35; white-space: normal}
.mm-form .mm-row .widget-button {width: auto; flex: none}
.mm-form .mm-row input:disabled, .mm-form .mm-row select:disabled {opacity: .5}
.mm-form .widget-label {text-align: left}
.mm-title {margin: .7em 0 .2em; line-height: 1.35} .mm-title .mm-quiet {font-weight: 400; margin-left: .5em}
.mm-text .widget-textarea {width: auto; flex-direction: column; align-items: stretch; height: auto}
.mm-text .widget-label {width: auto !important; max-width: none}
.mm-text textarea {font-family: var(--jp-code-font-family, monospace); white-space: pre; overflow: auto}
.mm-text pre {white-space: pre-wrap; margin: 0}
.mm-columns {display: flex; flex-wrap: wrap; gap: 1em} .mm-column {flex: 1 1 26em; min-width: 0}
.mm-column .mm-figures b {font-size: 1.2em}
.mm-changes ul {margin: 0; padding-left: 1.2em; line-height: 1.4} .mm-changes li {overflow-wrap: anywhere}
.mm-widget iframe {color-scheme: light; background: Canvas}
[data-jp-theme-light="false"] .mm-widget iframe, .vscode-dark .mm-widget iframe {color-scheme: dark}
.mm-widget summary {cursor: pointer} .mm-widget p {margin: .4em 0} .mm-widget svg {display: block; margin: .5em 0}
.mm-widget :is(input, select, textarea, button, .lm-TabBar-tab, [tabindex]:not(.mm-unit)):focus-visible {
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px}
</style>"""
_shown: dict[tuple[str, type], tuple[str, list[weakref.ref], list[weakref.ref]]] = {}
"""By cell and kind of widget: which run of the cell, what it has made so far, what the run before had made."""


class Whole(w.VBox):
    """A widget that stands in a cell by itself: with the style sheet, and heard while a cell runs."""

    def __init__(self, children: Sequence[w.Widget], **traits: Any):
        super().__init__([w.HTML(STYLE + LOOK, layout=w.Layout(display="none")), *children], **traits)
        self.add_class("mm-widget")
        hear_at_once(self)

    def close(self) -> None:
        """Take it off the page, with all inside it."""
        close_all(self)


def note(words: object, kind: str = "quiet", *, role: str = "") -> str:
    """A line of text as HTML, escaped. kind: quiet, warning or error. role: who hears the screen is told of it at once
    (alert), in time (status), or not."""
    told = f' role="{role}"' if role else ""
    return f'<div class="mm-{kind}"{told}>{escape(str(words))}</div>'


def close_all(widget: Any) -> None:
    """Close a widget and all inside it, in the browser and here."""
    for child in getattr(widget, "children", ()):
        child.close() if type(child).close is not w.Widget.close else close_all(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, w.Widget):
            part.close()
    w.Widget.close(widget)


def replace_older(widget: w.Widget) -> None:
    """Close what an earlier run of the same cell has made in this one's place: nobody can see it any more.

    Who follows the older one goes on with this one: it has a trait `successor`, if it has followers.
    """
    cell, message = _here()
    if not cell:
        return
    before, made, older = _shown.get((cell, type(widget)), (message, [], []))
    if before != message:
        made, older = [], made
    found = older.pop(0)() if older else None
    _shown[cell, type(widget)] = (message, [*made, weakref.ref(widget)], older)
    if found is not None:
        if found.has_trait("successor"):
            found.successor = widget
        found.close()


def _here() -> tuple[str, str]:
    """(id of the cell, id of this run of it); empty outside notebooks and where the front end names no cells."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    return parent.get("metadata", {}).get("cellId", ""), parent.get("header", {}).get("msg_id", "")
