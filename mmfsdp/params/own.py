"""A person's own code, named by its import path: `my_data:read`, or `{call: my_data:read, path: a.json, size: 3}`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import ParamError, did_you_mean

if TYPE_CHECKING:
    JsonValue = Any
else:
    from pydantic import JsonValue

OwnCode = str | dict[str, JsonValue]
"""Type of a field that names a person's own code: an import path, or a mapping of it, under `call`, and arguments."""
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
EXAMPLE = "my_module:name, or {call: my_module:name, size: 3} for arguments"


class OwnCodeError(ParamError):
    """A mistake in a person's own code. `traceback` has the lines of that code, and none of ours."""

    def __init__(self, field: str, message: str, traceback: str = ""):
        super().__init__(field, message)
        self.traceback = traceback


def check_own(value: OwnCode) -> OwnCode:
    """Return a value that names own code. Raises ValueError if it is no import path, with or without arguments."""
    path = value.get("call") if isinstance(value, dict) else value
    if not isinstance(path, str) or not PATH.fullmatch(path):
        raise ValueError(f"{value!r} is no import path; write {EXAMPLE}")
    for name in value if isinstance(value, dict) else ():
        if not name.isidentifier():
            raise ValueError(f"{value!r} has {name!r}, which is no name of an argument; write {EXAMPLE}")
    return value


def path_of(value: OwnCode) -> str:
    """Return the import path."""
    return str(value["call"]) if isinstance(value, dict) else value


def arguments_of(value: OwnCode) -> dict[str, Any]:
    """Return the arguments by name."""
    return {name: each for name, each in value.items() if name != "call"} if isinstance(value, dict) else {}


def load_own(field: str, value: OwnCode) -> Callable[..., Any]:
    """Import and return what a field names, without its arguments. Raises OwnCodeError."""
    module_name, _, name = path_of(value).partition(":")
    with own_errors(field, f"{path_of(value)!r} cannot be imported"):
        module = import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        there = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
        where = getattr(module, "__file__", None) or module_name
        kind = "is nothing to call" if found is not None else "is not there"
        raise OwnCodeError(field, f"{path_of(value)!r}: {name} {kind} in {where}{did_you_mean(name, there)}")
    return found


def call_own(field: str, value: OwnCode, *args: Any, **kwargs: Any) -> Any:
    """Import what a field names, and call it with its own arguments after those given. Raises OwnCodeError."""
    function = load_own(field, value)
    with own_errors(field, f"{path_of(value)!r} failed"):
        return function(*args, **kwargs, **arguments_of(value))


@contextmanager
def own_errors(field: str, words: str) -> Iterator[None]:
    """Raise what a person's code raises as an OwnCodeError of this field: words, the error, and its lines."""
    try:
        yield
    except ParamError:
        raise
    except Exception as error:
        text = "".join(own_traceback(error))
        raise OwnCodeError(field, f"{words}: {type(error).__name__}: {error}", text) from None


def own_traceback(error: BaseException) -> list[str]:
    """Return the lines of a traceback as Python prints it, from the first frame that is not ours on."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if _is_ours(frame.filename)]
    own = frames[max(ours) + 1 if ours else 0 :]
    return [*traceback.format_list(own), *traceback.format_exception_only(error)]


def _is_ours(file: str) -> bool:
    """Return True for a file of this package, of Python's import or of its contexts."""
    package = __file__.rpartition("params")[0]
    return file.startswith((package, "<frozen importlib")) or file.endswith(("importlib/__init__.py", "contextlib.py"))
