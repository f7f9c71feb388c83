"""One parameter in a form: its input, made from the field of its model, with help, reason or error next to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from types import NoneType
from typing import Any, get_args, get_origin

import ipywidgets as w
import yaml
from pydantic.fields import FieldInfo

from ...params import ParamError, RunParams
from ...params.base import leaves, plain, read_yaml
from ...params.own import names_own_code
from ...params.profiles import profile_names
from .markup import note

UNSET = "unset"
TRUTH_VALUES = {"true": True, "false": False}


def field_names() -> list[str]:
    """Return the dotted names of all fields that a form can show, section by section."""
    return list(leaves(RunParams().to_dict()))


def field_of(name: str) -> FieldInfo:
    """Return the field of a dotted name. Raises KeyError for an unknown one."""
    *path, last = name.split(".")
    model: Any = RunParams
    for part in path:
        model = model.model_fields[part].annotation
    return model.model_fields[last]


def default_of(name: str) -> Any:
    """Return the plain default of the field of a dotted name. Raises KeyError for an unknown one."""
    return plain(field_of(name).get_default(call_default_factory=True))


def whole_number(typed: str) -> int | str:
    """Return the integer that was typed, also as 1e9, 4_000 or 4,000; else the text, which the model refuses."""
    digits = typed.strip().replace(",", "").replace("_", "")
    try:
        return int(digits)
    except ValueError:
        pass
    try:
        number = float(digits)
    except ValueError:
        return typed
    return int(number) if number.is_integer() else typed


def known_profiles() -> list[str]:
    """Return the names of the profiles of clusters that a person can choose; none where their folder is missing."""
    try:
        return profile_names()
    except ParamError:  # told where a profile is read
        return []


def one_line(value: Any) -> str:
    """Return import paths as a person writes them: my_data:read, {call: my_data:read, size: 3}, or a list of these."""
    if isinstance(value, list) and len(value) < 2:
        value = value[0] if value else ""
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6)
    return text.strip()


class FieldRow(w.HBox):
    """Label, input, and help, reason or error of one parameter. `value` is plain data; reading it raises ParamError.

    kind: str, int, float, bool, an Enum, dict or tuple. optional: True if it may be unset.
    """

    def __init__(self, name: str, params: RunParams, *, changed: Callable[[], None]):
        """name: dotted, such as train.lr; raises KeyError for an unknown one. changed: called when it was edited."""
        self.name = name
        last, info = name.rpartition(".")[2], field_of(name)
        types = get_args(info.annotation) or (info.annotation,)
        self.optional = NoneType in types
        annotation = types[0] if self.optional else info.annotation
        self.is_own_code = names_own_code(info.annotation)
        kind: Any = get_origin(annotation) or annotation
        is_choice = isinstance(types[0], type) and issubclass(types[0], Enum)
        self.choices: type[Enum] | None = types[0] if is_choice else None
        self.kind: type = str if self.is_own_code and kind is not tuple else kind
        self.help = " ".join((info.description or "").split())
        self._filling = False
        self._disabled_reason = self._not_now = ""
        self.input = self._make_input()
        label = re.sub("_(gib|s|min)$", r" (\1)", last).replace("gib", "GiB")
        self.input.description, self.input.tooltip = label.replace("_", " "), self.help
        self.input.style.description_width = "12.5em"
        self.words = w.HTML()
        super().__init__([self.input, self.words])
        self.add_class("mm-row")
        self.show(params)
        self.input.observe(lambda _: None if self._filling else changed(), "value")

    def _make_input(self) -> Any:
        choices: list[str] = []
        if issubclass(self.kind, Enum):
            choices = [str(member.value) for member in self.kind]
        elif self.kind is bool:
            choices = list(TRUTH_VALUES)
        if choices:
            return w.Dropdown(options=[UNSET, *choices] if self.optional else choices)
        if self.is_own_code and self.choices:  # names of ours, or an import path
            names = [str(member.value) for member in self.choices]
            return w.Combobox(options=names, placeholder="my_module:name", continuous_update=False)
        if self.is_own_code:
            return w.Text(placeholder="my_module:name", continuous_update=False)
        if self.kind in (dict, tuple):
            return w.Textarea(continuous_update=False, rows=3, placeholder=UNSET if self.optional else "YAML")
        if self.name == "launch.cluster":
            return w.Combobox(placeholder=UNSET, options=known_profiles(), continuous_update=False)
        if self.kind is float and not self.optional:
            return w.FloatText(step=None)
        return w.Text(placeholder=UNSET if self.optional else "", continuous_update=False)

    @property
    def value(self) -> Any:
        """The plain value of the input."""
        return self._parse(self.input.value)

    def _parse(self, typed: Any) -> Any:
        if self.optional and typed in ("", UNSET):
            return None
        if self.is_own_code:  # an import path, or YAML of one with arguments, or of several
            return read_yaml(typed, name=self.name) or self.kind()
        if self.kind in (dict, tuple):
            return read_yaml(typed, name=self.name) or self.kind()
        if self.kind is int:
            return whole_number(typed)
        return TRUTH_VALUES[typed] if self.kind is bool else typed

    def show(self, params: RunParams) -> None:
        """Show the field's value, and disable the field if it has no effect with these parameters."""
        self._disabled_reason = params.why_idle(self.name)
        typed = self.as_typed(plain(attrgetter(self.name)(params)))
        self._not_now = ""  # choices that these parameters do not allow, with the reason
        for choice in getattr(self.input, "options", ()):
            reason = params.why_unavailable(self.name, self._parse(choice))[0]
            if reason and choice != typed:
                self._not_now += note(f"{choice} not now: {reason}.")
        self._filling = True
        self.input.value = typed
        self._filling = False
        self.mark("")

    def is_edited(self, params: RunParams) -> bool:
        """Return whether the input shows another value than these parameters have."""
        return bool(self.input.value != self.as_typed(plain(attrgetter(self.name)(params))))

    def as_typed(self, value: Any) -> Any:
        """Return a plain value as a person would type or choose it."""
        if value is None:
            return UNSET if isinstance(self.input, w.Dropdown) else ""
        if isinstance(value, bool):
            return str(value).lower()
        if self.is_own_code:
            return one_line(value)
        if self.kind in (dict, tuple):
            if not value and self.optional:
                return "[]"  # "" is unset
            if not value or isinstance(value, str):
                return value or ""
            return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None).strip()
        return value if isinstance(self.input, w.FloatText) else str(value)

    def choose(self, value: Any) -> None:
        """Type or choose a plain value."""
        self.input.value = self.as_typed(value)

    def is_found_by(self, search: str) -> bool:
        """Return True if the name, the label or the help holds this text."""
        return search.casefold() in f"{self.name} {self.input.description} {self.help}".casefold()

    def mark(self, error: str) -> None:
        """Show an error next to the field; without one why it has no effect, or what its value means."""
        if error:
            html = note(error, "error", role="alert")
        elif self._disabled_reason:
            html = note(f"Not now: it {self._disabled_reason}.")
        else:
            words = re.split(r"(?<=\.) (?=[A-Z])", self.help)[0]  # the first sentence
            if self.choices and self.input.value in list(self.choices):
                words = getattr(self.choices(self.input.value), "description", "") or words
            if self.choices and self.is_own_code:  # a field to type into does not show what else there is
                others = [str(choice.value) for choice in self.choices if choice.value != self.input.value]
                words += f" Others: {', '.join([*others, 'your own, as my_module:name'])}."
            html = note(words.replace("`", "")) + self._not_now
        self.input.disabled = bool(self._disabled_reason) and not error
        self.words.value = f'<code class="mm-name">{self.name}</code>{html}'
