"""One parameter in a form: its input, made from the dataclass field, with help, reason or error beside it."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from html import escape
from typing import Any, get_args, get_origin

import ipywidgets as w
import yaml

from ..params import RunParams
from ..params.check import type_hints
from ..params.docs import field_docs
from ..params.run import plain, read_yaml
from .style import note

UNSET = "unset"
UNITS = {"_gib": " (GiB)", "_s": " (s)", "_min": " (min)"}
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Field:
    """One parameter, as its dataclass declares it."""

    name: str
    """Dotted name, such as train.lr."""

    hints: tuple[Any, ...]
    """Types it may have; NoneType among them where it may be unset."""

    help: str
    """Its docstring."""

    default: Any
    """As plain data."""

    @classmethod
    @cache
    def named(cls, name: str) -> Field:
        """The field of RunParams with this dotted name."""
        *path, last = name.split(".")
        owner: Any = RunParams
        for part in path:
            owner = type_hints(owner)[part]
        hint = type_hints(owner)[last]
        (field,) = (f for f in fields(owner) if f.name == last)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        hints = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        return cls(name, hints, field_docs(owner)[last], plain(default))

    @property
    def label(self) -> str:
        """Its name for people, with its unit."""
        last = self.name.split(".")[-1]
        unit = next((end for end in UNITS if last.endswith(end)), "")
        return last.removesuffix(unit).replace("_", " ") + UNITS.get(unit, "")

    @property
    def optional(self) -> bool:
        """It may be unset."""
        return type(None) in self.hints

    @property
    def kind(self) -> Any:
        """What its value is, if it is set: str, int, float, bool, an Enum, dict or tuple."""
        first = next(hint for hint in self.hints if hint is not type(None))
        return get_origin(first) or first

    @property
    def enum(self) -> type[Enum] | None:
        """What its choices are members of, if of any."""
        return self.kind if issubclass(self.kind, Enum) else None

    @property
    def choices(self) -> list[str]:
        """What may be chosen; empty where any text or number may be typed."""
        known = [str(member.value) for member in self.enum] if self.enum else list(_TRUTH) * (self.kind is bool)
        return [UNSET] * (self.optional and bool(known)) + known

    @property
    def words(self) -> bool:
        """It holds any number of texts."""
        return self.hints == (tuple[str, ...],)

    def explain(self, value: Any) -> str:
        """What the chosen value means where that is written down, else the first sentence about the field."""
        meaning = field_docs(self.enum).get(str(value).upper()) if self.enum else None
        return (meaning or re.split(r"(?<=\.) (?=[A-Z])", self.help)[0]).replace("`", "")

    def read(self, typed: Any) -> Any:
        """Plain data from what an input holds. Raises ParamError."""
        if self.optional and typed in ("", UNSET):
            return None
        if self.words:
            return [line.strip() for line in typed.splitlines() if line.strip()]
        if self.kind in (dict, tuple):
            return read_yaml(typed, name=self.name) or ([] if self.kind is tuple else {})
        return _TRUTH.get(typed, typed) if self.kind is bool else typed

    def write(self, value: Any) -> Any:
        """What an input holds for plain data."""
        if value is None or isinstance(value, bool):
            return {None: UNSET if self.choices else "", True: "true", False: "false"}[value]
        if self.words:
            return "\n".join(value)
        if self.kind in (dict, tuple):
            return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None).strip()
        return value if not self.optional and self.kind in (int, float) else str(value)


def names(owner: Any = RunParams, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields that a form can show, section by section."""
    for name, hint in type_hints(owner).items():
        if is_dataclass(hint):
            yield from names(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def at(params: RunParams, name: str) -> Any:
    """The plain value of a field by its dotted name."""
    value: Any = params
    for part in name.split("."):
        value = getattr(value, part)
    return plain(value)


class Row(w.HBox):
    """Label, input, and help, reason or error. `value` is plain data; reading it raises ParamError for a bad text."""

    def __init__(self, field: Field, value: Any, *, changed: Callable[[str], None]):
        self.field = field
        self._quiet = False
        self._input = _input_for(field)
        self._input.description, self._input.tooltip = field.label, field.help
        self._input.style.description_width = "11em"
        self._words = w.HTML()
        super().__init__([self._input, self._words])
        self.add_class("mm-row")
        self.value = value
        self._input.observe(lambda _: None if self._quiet else changed(field.name), "value")

    @property
    def value(self) -> Any:
        """Plain data; raises ParamError for a bad text."""
        return self.field.read(self._input.value)

    @value.setter
    def value(self, value: Any) -> None:
        self._set(self.field.write(value))

    def say(
        self, error: str | None, *, refused: dict[str, str] | None = None, closed: str | None = None, span: str = ""
    ) -> None:
        """Show the error, or the help where there is none.

        refused: choices that cannot be made now, with the reasons. closed: why it can have no other value at all.
        span: the numbers that it may hold.
        """
        refused, typed = refused or {}, self._input.value
        if self.field.choices and not closed:
            options = [choice for choice in self.field.choices if choice == typed or choice not in refused]
            if options != list(self._input.options):
                self._set(typed, options)
        if self._input.disabled != bool(closed and not error):
            self._input.disabled = bool(closed and not error)
        if error:
            text = note(error, "error", role="alert")
        elif closed:
            text = note(f"Not now: it {closed}.")
        else:
            off = "".join(
                f'<div class="mm-quiet"><s class="mm-off" aria-disabled="true">{escape(choice)}</s> '
                f"not now: {escape(reason)}.</div>"
                for choice, reason in refused.items()
            )
            about = " ".join([self.field.explain(typed), f"({span})" if span else ""])
            text = note(about) + off
        if self._words.value != text:
            self._words.value = text

    def _set(self, typed: Any, options: list[str] | None = None) -> None:
        """Change the input without telling anybody."""
        self._quiet = True
        try:
            with self._input.hold_sync():
                if self.field.choices and (options or typed not in self._input.options):
                    self._input.options = options or self.field.choices
                if self._input.value != typed:
                    self._input.value = typed
        finally:
            self._quiet = False


def _input_for(field: Field) -> Any:
    if field.choices:
        return w.Dropdown(options=field.choices)
    if not field.optional and field.kind in (int, float):
        return w.IntText() if field.kind is int else w.FloatText(step=None)
    if field.kind in (dict, tuple):
        return w.Textarea(continuous_update=False, rows=3, placeholder="one a line" if field.words else "YAML")
    return w.Text(placeholder=UNSET if field.optional else "", continuous_update=False)
