"""One parameter in a form: its input, made from the field of its model, with help, reason or error beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

import ipywidgets as w
import yaml
from pydantic.fields import FieldInfo

from ..params import RunParams
from ..params.base import Params, plain, read_yaml
from .markup import note

UNSET = "unset"
TRUTH_VALUES = {"true": True, "false": False}
UNITS = {"_gib": "(GiB)", "_s": "(s)", "_min": "(min)"}


def field_names(model: type[Params] = RunParams, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields that a form can show, section by section."""
    names = []
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Params):
            names += field_names(info.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def value_of(params: RunParams, name: str) -> Any:
    """Return the plain value of a field by its dotted name."""
    value: Any = params
    for part in name.split("."):
        value = getattr(value, part)
    return plain(value)


@dataclass(frozen=True)
class FormField:
    """One parameter, as its model declares it."""

    name: str
    """Dotted name, such as train.lr."""
    info: FieldInfo
    kind: type
    """str, int, float, bool, an Enum, dict or tuple."""
    optional: bool
    """True if it may be unset."""

    @classmethod
    @cache
    def named(cls, name: str) -> FormField:
        """Return the field of RunParams with this dotted name. Raises KeyError if there is none."""
        *path, last = name.split(".")
        model: Any = RunParams
        for part in path:
            model = model.model_fields[part].annotation
        info = model.model_fields[last]
        types = get_args(info.annotation) or (info.annotation,)
        optional = NoneType in types
        annotation = types[0] if optional else info.annotation
        return cls(name, info, get_origin(annotation) or annotation, optional)

    @property
    def help(self) -> str:
        """The docstring of the field on one line."""
        return " ".join((self.info.description or "").split())

    @property
    def label(self) -> str:
        """The name for people, with its unit."""
        name = self.name.rpartition(".")[2]
        for ending, unit in UNITS.items():
            if name.endswith(ending):
                return f"{name.removesuffix(ending).replace('_', ' ')} {unit}"
        return name.replace("_", " ")

    @property
    def default(self) -> Any:
        """The default as plain data."""
        return plain(self.info.get_default(call_default_factory=True))

    @property
    def choices(self) -> list[str]:
        """The choices; empty where text or a number is typed."""
        choices: list[str] = []
        if issubclass(self.kind, Enum):
            choices = [str(member.value) for member in self.kind]
        elif self.kind is bool:
            choices = list(TRUTH_VALUES)
        return [UNSET, *choices] if choices and self.optional else choices

    def explain(self, typed: Any) -> str:
        """Return the meaning of the chosen member of an enum, else the first sentence of the help."""
        words = re.split(r"(?<=\.) (?=[A-Z])", self.help)[0]
        if issubclass(self.kind, Enum) and typed != UNSET:
            words = getattr(self.kind(typed), "description", "") or words
        return words.replace("`", "")

    def parse(self, typed: Any) -> Any:
        """Return plain data from the value of an input. Raises ParamError."""
        if self.optional and typed in ("", UNSET):
            return None
        if self.kind in (dict, tuple):
            return read_yaml(typed, name=self.name) or self.kind()
        return TRUTH_VALUES[typed] if self.kind is bool else typed

    def format(self, value: Any) -> Any:
        """Return the value of an input for plain data."""
        if value is None:
            return UNSET if self.choices else ""
        if isinstance(value, bool):
            return str(value).lower()
        if self.kind in (dict, tuple):
            return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None).strip()
        return str(value) if self.optional else value


class FieldRow(w.HBox):
    """Label, input, and help, reason or error. `value` is plain data; reading it raises ParamError for a bad text."""

    def __init__(self, name: str, params: RunParams, *, changed: Callable[[], None]):
        self.field = FormField.named(name)
        self._filling = False
        self._disabled_reason = ""
        self._input = _input_for(self.field)
        self._input.description, self._input.tooltip = self.field.label, self.field.help
        self._input.style.description_width = "12.5em"
        self._words = w.HTML()
        super().__init__([self._input, self._words])
        self.add_class("mm-row")
        self.show(params)
        self._input.observe(lambda _: None if self._filling else changed(), "value")

    @property
    def value(self) -> Any:
        """The plain value of the input."""
        return self.field.parse(self._input.value)

    def show(self, params: RunParams) -> None:
        """Show the field's value, and disable the field if it has no effect beside these parameters."""
        self._disabled_reason = params.unavailable(self.field.name).partition(";")[0]  # without the advice
        self._filling = True
        self._input.value = self.field.format(value_of(params, self.field.name))
        self._filling = False
        self.mark("")

    def mark(self, error: str) -> None:
        """Show an error beside the field, or its help where `error` is empty."""
        if error:
            html = note(error, "error", role="alert")
        elif self._disabled_reason:
            html = note(f"Not now: it {self._disabled_reason}.")
        else:
            html = note(self.field.explain(self._input.value))
        self._input.disabled = bool(self._disabled_reason) and not error
        self._words.value = html


def _input_for(field: FormField) -> Any:
    if field.choices:
        return w.Dropdown(options=field.choices)
    if field.kind in (dict, tuple):
        return w.Textarea(continuous_update=False, rows=3, placeholder="YAML")
    if field.kind is int and not field.optional:
        return w.IntText()
    if field.kind is float and not field.optional:
        return w.FloatText(step=None)
    return w.Text(placeholder=UNSET if field.optional else "", continuous_update=False)
