"""A person's own code, named by its import path: `my_data:read`, or `{call: my_data:read, path: a.json, size: 3}`.

Naming it runs nothing: mmfsdp/own imports and calls it.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BeforeValidator

from .base import Params

if TYPE_CHECKING:
    JsonValue = Any
else:
    from pydantic import JsonValue

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
EXAMPLE = "my_module:name, or {call: my_module:name, size: 3} for arguments"


def check_own(value: Any) -> Any:
    """Return a value that names own code. Raises ValueError if it is no import path, with or without arguments."""
    path = value.get("call") if isinstance(value, dict) else value
    if not isinstance(path, str) or not PATH.fullmatch(path):
        raise ValueError(f"{value!r} is no import path; write {EXAMPLE}")
    for name in value if isinstance(value, dict) else ():
        if not str(name).isidentifier():
            raise ValueError(f"{value!r} has {name!r}, which is no name of an argument; write {EXAMPLE}")
    return value


def check_list(value: Any) -> Any:
    """Return a list of what names own code; a single path stands for a list of one."""
    return [value] if isinstance(value, (str, dict)) else value


OwnCode = Annotated[str | dict[str, JsonValue], BeforeValidator(check_own)]
"""Type of a field that names a person's own code: an import path, or a mapping of it, under `call`, and arguments.

A field is `OwnCode | None`, `OwnCodes`, or `OwnCode` or one of ours (an enum), so that `own_fields` finds it.
"""
OwnCodes = Annotated[tuple[OwnCode, ...], BeforeValidator(check_list)]


def names_own_code(annotation: Any) -> bool:
    """Return True for the type of a field that holds one or several import paths."""
    return OwnCode in get_args(annotation)


def is_own_code(value: Any) -> bool:
    """Return True for a value of such a field that names own code: it is set, and no choice of ours."""
    return value is not None and not isinstance(value, Enum)


def own_fields(params: Params) -> list[tuple[str, OwnCode]]:
    """Return (dotted name, value) of all own code that parameters name. Each value of a list has the list's name."""
    found: list[tuple[str, OwnCode]] = []
    for name, field in type(params).model_fields.items():
        value = getattr(params, name)
        values = value if isinstance(value, tuple) else (value,)
        if names_own_code(field.annotation):
            found += [(name, each) for each in values if is_own_code(each)]
            continue
        for place, each in enumerate(values):
            if isinstance(each, Params):
                prefix = f"{name}.{place}" if isinstance(value, tuple) else name
                found += [(f"{prefix}.{inner}", code) for inner, code in own_fields(each)]
    return found


def path_of(value: OwnCode) -> str:
    """Return the import path."""
    return str(value["call"]) if isinstance(value, dict) else value


def module_of(value: OwnCode) -> str:
    """Return the name of the module."""
    return path_of(value).partition(":")[0]


def arguments_of(value: OwnCode) -> dict[str, Any]:
    """Return the arguments by name."""
    return {name: each for name, each in value.items() if name != "call"} if isinstance(value, dict) else {}
