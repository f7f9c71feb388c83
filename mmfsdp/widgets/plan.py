"""PlanView: the plan of the choices in a form, drawn anew when they change."""

from __future__ import annotations

import threading
from html import escape
from typing import TYPE_CHECKING

import ipywidgets as w

from ..params import RunParams
from ..report import plan_html
from ..style import STYLE
from .form import RunForm
from .heavy import alone, plan_of

if TYPE_CHECKING:
    from ..plan import WrapPlan


class PlanView(w.VBox):
    """Units, bytes and findings of the plan that a form's choices make, before anything is started.

    plan is the newest one, None before the first. A thread makes it, since torch takes seconds to import.
    """

    def __init__(self, form: RunForm):
        self.plan: WrapPlan | None = None
        self._wanted = form.params
        self._html, self._note = w.HTML(), w.HTML()
        super().__init__([w.HTML(STYLE), self._note, self._html])
        self.add_class("mm-widget")
        form.observe(lambda change: self._draw_later(change.new), "params")
        self._draw_later(form.params)

    def wait(self) -> WrapPlan:
        """Wait for the plan of the present choices. Raises what kept it from being made."""
        self._thread.join()
        if self._failure:
            raise self._failure
        assert self.plan is not None
        return self.plan

    def _draw_later(self, params: RunParams) -> None:
        self._wanted = params
        self._note.value = '<div class="mm-quiet">making the plan…</div>'
        self._thread = threading.Thread(target=self._draw, args=(params,), daemon=True, name="plan")
        self._thread.start()

    def _draw(self, params: RunParams) -> None:
        with alone:
            if params is not self._wanted:
                return  # somebody has chosen something else meanwhile
            self._failure: Exception | None = None
            try:
                self.plan, cost = plan_of(params)
                self._html.value = plan_html(self.plan, cost.to_dict())
                self._note.value = ""
            except Exception as error:  # nobody is above this thread: it is shown, and raised by wait()
                self._failure = error
                self._note.value = f'<div class="mm-error">{escape(str(error) or type(error).__name__)}</div>'
                self._html.value = ""
