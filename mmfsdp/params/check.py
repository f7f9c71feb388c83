"""Checks on parameter values: every mistake becomes one ParamError that names field, value, choices and fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

LONGEST = 1200
"""Characters of an error's message; of a longer one, which quotes a long value, the middle is left out."""


DEEPEST = 50
"""Levels of a mapping that is passed on to a library."""
BEYOND = 2**63, 1e38
"""No whole number and no other in a configuration is as large: torch holds counts in 64 bits, rates in 32."""


class ParamError(ValueError):
    """A person's mistake in a parameter: one line. `field` is its dotted name."""

    def __init__(self, field: str, message: str):
        self.field = _short(" ".join(field.split()), 200) or repr(field)
        self.message = _short(" ".join(message.split()), LONGEST)
        super().__init__(f"{self.field}: {self.message}")

    def under(self, prefix: str) -> ParamError:
        """The same error, with the field named from one level up."""
        return ParamError(f"{prefix}.{self.field}", self.message)


def _short(text: str, longest: int) -> str:
    half = longest // 2
    text = text.encode("utf-8", "backslashreplace").decode()  # what cannot be printed must not hide the error
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


@cache
def type_hints(cls: Any) -> dict[str, Any]:
    """A class's declared types by name. Finding them takes a hundred times longer than using them."""
    return get_type_hints(cls)


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter]:
    hints = type_hints(cls)
    config = ConfigDict(strict=False, allow_inf_nan=False)
    return {
        f.name: TypeAdapter(hints[f.name]) if is_dataclass(hints[f.name]) else TypeAdapter(hints[f.name], config=config)
        for f in fields(cls)
    }


def coerce(obj: Any) -> None:
    """Pass every field of a frozen dataclass through its declared type, in place. Raises ParamError.

    Strings become enum members, lists become tuples; what does not fit is an error. Called from `__post_init__`.
    """
    for f in fields(obj):
        value = getattr(obj, f.name)
        if is_dataclass(value):
            continue
        if value and isinstance(value, (list, tuple)) and all(map(is_dataclass, value)):
            object.__setattr__(obj, f.name, tuple(value))
            continue
        object.__setattr__(obj, f.name, _one(type(obj), f.name, value))


def _one(cls: type, name: str, value: Any) -> Any:
    choices = _choices(cls, name)
    if isinstance(value, (int, float)) and abs(value) >= BEYOND[isinstance(value, float)]:
        raise ParamError(name, "is beyond what torch can hold; make it smaller")
    if isinstance(value, str) and "\0" in value:
        raise ParamError(name, f"{value!r} holds a null character; remove it")
    if isinstance(value, bool) and bool not in _members(cls, name):
        raise ParamError(name, f"{value!r} is not {_wanted(cls, name)}")
    if choices and isinstance(value, str) and not isinstance(value, Enum) and value not in choices:
        match = [c for c in choices if c.lower() == value.lower().replace("-", "_")]
        near = match or difflib.get_close_matches(value, choices, n=1, cutoff=0.4)
        raise ParamError(
            name, f"{value!r} is not one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
        )
    try:
        return _adapters(cls)[name].validate_python(value)
    except ValidationError as error:
        raise ParamError(name, f"{value!r} is not {_wanted(cls, name)} ({error.errors()[0]['msg']})") from None


def _members(cls: type, name: str) -> tuple:
    hint = type_hints(cls)[name]
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(cls: type, name: str) -> list[str]:
    enums = [m for m in _members(cls, name) if isinstance(m, type) and issubclass(m, Enum)]
    return [member.value for enum in enums for member in enum]


def _wanted(cls: type, name: str) -> str:
    choices = _choices(cls, name)
    if choices:
        return "one of " + ", ".join(choices)
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names |= {dict: "a mapping", tuple: "a list", type(None): "null"}
    return " or ".join(names.get(get_origin(m) or m, str(m)) for m in _members(cls, name))


def need(ok: bool, field: str, message: str) -> None:
    """Raise ParamError(field, message) unless ok."""
    if not ok:
        raise ParamError(field, message)


def need_plain(field: str, value: Any) -> None:
    """Raise ParamError unless YAML and JSON give a value back as it was."""
    need(field.count(".") < DEEPEST, field, f"lies more than {DEEPEST} levels deep")
    if isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            need(isinstance(key, str) or not isinstance(value, dict), field, f"{key!r} is a key that is not text")
            need_plain(f"{field}.{key}", one)
        return
    if isinstance(value, (int, float)):
        need(abs(value) < BEYOND[isinstance(value, float)], field, "is beyond what torch can hold; make it smaller")
    elif value is not None and not isinstance(value, str):
        need(False, field, f"{value!r} is not text, a number, true, false, null, a list or a mapping")


def at_least(obj: Any, low: float, *names: str) -> None:
    """Every named field that is not None must be at least `low`."""
    for name in names:
        value = getattr(obj, name)
        need(value is None or value >= low, name, f"{value!r} is too small; it must be at least {low}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What an error about a word that is none of a few says on: the nearest of them, and all."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return "".join(f"; did you mean {one}?" for one in near) + f"; choose {', '.join(known)}"


def unknown_key(key: str, known: Iterable[str]) -> ParamError:
    """The error for a key that no field has, with the nearest field's name."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hints = [f"did you mean {near[0]}?"] if near else []
    if len(known) < 50 or not near:
        hints += [f"the fields here are {', '.join(known)}" if len(known) < 50 else "`mmfsdp plan --help` lists them"]
    return ParamError(key, f"no such field; {' '.join(hints)}")
