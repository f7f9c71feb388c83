"""Import and call what a field of the parameters names; errors show a person's lines, and none of this package.

modules.py says where modules are found.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..params.base import ParamError, did_you_mean, without_controls
from ..params.own import OwnCode, arguments_of, module_of, path_of
from .modules import finding, import_own, is_of_package, is_persons_file, module_names


class OwnCodeError(ParamError):
    """A mistake in a person's own code. `traceback` has the lines of that code, and none of ours."""

    def __init__(self, field: str, message: str, traceback: str = ""):
        super().__init__(field, message)
        self.traceback = without_controls(traceback)

    def under(self, prefix: str) -> OwnCodeError:
        """Return the same error with the field named from one level up."""
        return OwnCodeError(f"{prefix}.{self.field}", self.message, self.traceback)

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback through this package."""
        return [*self.traceback.splitlines(), f"OwnCodeError: {self}"]


def load_own(field: str, value: OwnCode) -> Callable[..., Any]:
    """Import and return what a field names, without its arguments. Raises OwnCodeError."""
    path, module_name = path_of(value), module_of(value)
    with own_errors(field, f"{path!r} cannot be imported"):
        try:
            module = import_own(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # of another module, which it imports
            near = did_you_mean(module_name, module_names()).partition(" C")[0] if module_names() else ""
            words = f"{path!r} cannot be imported: there is no module {error.name!r} in the current folder or installed"
            raise OwnCodeError(field, words + (near if near.startswith("; did") else "")) from None
    name = path.partition(":")[2]
    found = getattr(module, name, None)
    if not callable(found):
        there = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
        where = getattr(module, "__file__", None) or module_name
        kind = "is nothing to call" if found is not None else "is not there"
        raise OwnCodeError(field, f"{path!r}: {name} {kind} in {where}{did_you_mean(name, there)}")
    return found


def check_call(field: str, value: OwnCode, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Import and return what a field names, without calling it.

    Raises OwnCodeError also if it does not take these arguments and its own.
    """
    function = load_own(field, value)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return function
    try:
        signature.bind(*args, **kwargs, **arguments_of(value))
    except TypeError as error:
        name = path_of(value).partition(":")[2]
        raise OwnCodeError(field, f"{path_of(value)!r}: {name}{signature} is called wrongly: {error}") from None
    return function


def call_own(field: str, value: OwnCode, *args: Any, **kwargs: Any) -> Any:
    """Import what a field names, and call it with its own arguments after those given. Raises OwnCodeError."""
    function = check_call(field, value, *args, **kwargs)
    with own_errors(field, f"{path_of(value)!r} raised"), finding(module_of(value)):
        return function(*args, **kwargs, **arguments_of(value))


@contextmanager
def own_errors(field: str, words: str) -> Iterator[None]:
    """Run a person's code: what it raises becomes an OwnCodeError of this field of words, the error and its lines.

    What it imports is found as `load_own` finds it. A ParamError that did not come through a person's code passes.
    """
    try:
        with finding():
            yield
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ParamError) and not own_place(error):
            raise
        text = "".join(own_traceback(error))
        link = " " if words.endswith("raised") else ": "
        raise OwnCodeError(field, f"{words}{link}{type(error).__name__}: {error}", text) from None


def own_traceback(error: BaseException) -> list[str]:
    """Return the lines of a traceback as Python prints it, from the first frame of a person's code on, without ours.

    The error that it was raised from, or while that was handled, stands above it.
    """
    earlier, link = error.__cause__, "\nThe above exception was the direct cause of the following exception:\n\n"
    if earlier is None and not error.__suppress_context__:
        earlier, link = error.__context__, "\nDuring handling of the above exception, another exception occurred:\n\n"
    above = [*own_traceback(earlier), link] if earlier is not None else []
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, frame in enumerate(frames) if is_persons_file(frame.filename)), len(frames))
    shown = [frame for frame in frames[first:] if not is_of_package(frame.filename)]
    head = ["Traceback (most recent call last):\n"] if shown else []
    return [*above, *head, *traceback.format_list(shown), *traceback.format_exception_only(error)]


def own_place(error: BaseException) -> str:
    """Return the last line of a person's code that an error came through, as `my_data.py, line 12`; "" if none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_persons_file(frame.filename)]
    return f"{frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}" if frames else ""
