"""One parameter in a form: its input, made from the dataclass field, with help or the error beside it."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import Any, get_args, get_type_hints

import ipywidgets as w

from ..params import RunParams
from ..params.docs import field_docs

UNSET = "unset"
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Field:
    """One parameter, as its dataclass declares it."""

    name: str
    """Dotted name, such as train.lr."""

    kinds: tuple[type, ...]
    """Types it may have; NoneType among them where it may be unset."""

    help: str
    """Its docstring."""

    @classmethod
    def named(cls, name: str) -> Field:
        """The field of RunParams with this dotted name."""
        section, last = name.split(".")
        owner = get_type_hints(RunParams)[section]
        hint = get_type_hints(owner)[last]
        return cls(name, get_args(hint) if isinstance(hint, types.UnionType) else (hint,), field_docs(owner)[last])

    @property
    def optional(self) -> bool:
        return type(None) in self.kinds

    @property
    def enum(self) -> type[Enum] | None:
        return next((kind for kind in self.kinds if issubclass(kind, Enum)), None)

    @property
    def choices(self) -> list[str]:
        """What may be chosen; empty where any text or number may be typed."""
        known = [str(member.value) for member in self.enum] if self.enum else list(_TRUTH) * (bool in self.kinds)
        return [UNSET] * (self.optional and bool(known)) + known

    def explain(self, value: Any) -> str:
        """What the chosen value means where that is written down, else the first sentence about the field."""
        meaning = field_docs(self.enum).get(str(value).upper()) if self.enum else None
        return meaning or re.split(r"(?<=\.) (?=[A-Z])", self.help)[0]


class Row(w.HBox):
    """Label, input, and help or error. `value` is plain data: a text, a number, a truth value or None."""

    def __init__(self, field: Field, value: Any, *, changed: Callable[[], None]):
        self.field = field
        self._changed = changed
        self._input = _input_for(field)
        self._words = w.HTML(layout=w.Layout(flex="1 1 16em"))
        label = field.name.split(".")[-1].replace("_", " ")
        self._input.description, self._input.tooltip = label, field.help
        self._input.style.description_width = "9em"
        self._input.layout = w.Layout(width="23em")
        super().__init__([self._input, self._words], layout=w.Layout(flex_flow="row wrap", align_items="center"))
        self.value = value
        self._input.observe(lambda _: self._changed(), "value")

    @property
    def value(self) -> Any:
        typed = self._input.value
        if self.field.optional and typed in ("", UNSET):
            return None
        return _TRUTH.get(typed, typed) if bool in self.field.kinds else typed

    @value.setter
    def value(self, value: Any) -> None:
        free = isinstance(self._input, w.Text)
        words = {None: "" if free else UNSET, True: "true", False: "false"}
        self._input.value = words[value] if value is None or isinstance(value, bool) else str(value) if free else value

    def say(self, error: str | None) -> None:
        """Show the error, or the help where there is none."""
        text = error or self.field.explain(self.value)
        self._words.value = f'<div class="mm-{"error" if error else "quiet"}">{escape(text)}</div>'


def _input_for(field: Field) -> w.ValueWidget:
    if field.choices:
        return w.Dropdown(options=field.choices)
    if field.kinds in ((int,), (float,)):
        return w.IntText() if field.kinds == (int,) else w.FloatText()
    return w.Text(placeholder=UNSET if field.optional else "", continuous_update=False)
