"""A person's own callbacks, `train.callbacks`: objects of any class with some of the methods of METHODS."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch.distributed as dist

from ..params import RunParams
from ..params.base import did_you_mean
from ..params.own import OwnCode, OwnCodeError, call_own, check_call, own_errors, path_of
from .callbacks import Callback, Training

FIELD = "train.callbacks"
ARGUMENTS = {
    "on_train_begin": (),
    "on_step_end": ("row",),
    "on_evaluate": ("scores",),
    "on_save": ("step",),
    "on_train_end": ("result",),
}
METHODS = tuple(ARGUMENTS)
"""The methods that are called where a callback has them."""


def check_callbacks(params: RunParams) -> list[str]:
    """Import the own callbacks, and return what was found of each, in words.

    None is made: that may open a tracker. Raises OwnCodeError for one that cannot be imported, does not take its
    arguments, or is a class with an unknown method or none.
    """
    words = []
    for value in params.train.callbacks:
        made = check_call(FIELD, value)
        methods = check_methods(made, path_of(value)) if inspect.isclass(made) else ["made when the run starts"]
        words.append(f"{path_of(value)}: {', '.join(methods)}")
    return words


def check_methods(callback: Any, path: str) -> list[str]:
    """Return the methods of METHODS that a callback, or its class, has. Raises OwnCodeError as `check_callbacks`."""
    names = [name for name in dir(callback) if name.startswith("on_")]
    for name in names:
        if name not in METHODS:
            raise OwnCodeError(FIELD, f"{path} has a method {name}, which nobody calls{did_you_mean(name, METHODS)}")
        _check_arguments(callback, name, path)
    owner = callback if inspect.isclass(callback) else type(callback)
    for name in OURS_ONLY if issubclass(owner, Callback) else ():
        if getattr(owner, name) is not getattr(Callback, name):
            words = f"{path} overrides {name}, which is not called on an own callback; use {', '.join(METHODS)}"
            raise OwnCodeError(FIELD, words)
    if not names:
        kind = callback.__name__ if inspect.isclass(callback) else type(callback).__name__
        raise OwnCodeError(FIELD, f"{path} gives a {kind}, which has none of the methods {', '.join(METHODS)}")
    return [name for name in METHODS if name in names]


def _check_arguments(callback: Any, name: str, path: str) -> None:
    """Raise OwnCodeError if a method of a callback, or of its class, does not take what it is called with."""
    arguments = ARGUMENTS[name]
    method = inspect.getattr_static(callback, name)
    bound = isinstance(method, (staticmethod, classmethod)) or not inspect.isclass(callback)
    try:
        inspect.signature(getattr(callback, name)).bind(*(() if bound else ("self",)), *arguments)
    except TypeError as error:
        words = f"{path}.{name} is called as {name}({', '.join(arguments)}), which it does not take: {error}"
        raise OwnCodeError(FIELD, words) from None
    except ValueError:  # of no Python function
        return


OURS_ONLY = ("around_step", "after_step", "due")
"""Methods of the package's own callbacks, which a person's may not have: a class that inherits ours would."""


def own_callbacks(training: Training) -> Callback | None:
    """Make the own callbacks of a run, if it has any."""
    values = training.setup.params.train.callbacks
    return OwnCallbacks(training, values) if values else None


class OwnCallbacks(Callback):
    """Calls a person's callbacks in their order.

    A heartbeat names the method before it is called. What it raises ends the run, by its name. Each gets a copy of the
    row, so that a change of it is seen by nobody else.
    """

    def __init__(self, training: Training, values: tuple[OwnCode, ...]) -> None:
        self._training = training
        self._callbacks: list[tuple[str, Any]] = []
        for value in values:
            path = path_of(value)
            made = check_call(FIELD, value)
            if dist.get_rank() and getattr(made, "rank0_only", False):
                continue
            training.beat(f"taking up callback {path}")
            callback = call_own(FIELD, value)
            check_methods(callback, path)
            if not (dist.get_rank() and getattr(callback, "rank0_only", False)):
                self._callbacks.append((path, callback))

    def on_train_begin(self) -> None:
        """Begin, before the first step."""
        self._call("on_train_begin")

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Hand over a row."""
        self._call("on_step_end", row)

    def on_evaluate(self, scores: dict[str, float]) -> None:
        """Hand over what was evaluated."""
        self._call("on_evaluate", scores)

    def on_save(self, step: int) -> None:
        """Say that a checkpoint was written."""
        self._call("on_save", step)

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Hand over the result."""
        self._call("on_train_end", result)

    def close(self) -> None:
        """Close those that can be closed, also after an error."""
        for path, callback in self._callbacks:
            if callable(getattr(callback, "close", None)):
                with own_errors(FIELD, f"{path}.close raised"):
                    callback.close()

    def _call(self, method: str, *args: Any) -> None:
        step = self._training.state.step
        at = f"step {step}" if step else "taking up"
        if method == "on_train_end":
            at = "trained"
        for path, callback in self._callbacks:
            if hasattr(callback, method):
                self._training.beat(f"{at} callback {path}.{method}")
                with own_errors(FIELD, f"{path}.{method} raised"):
                    getattr(callback, method)(*copy.deepcopy(args))
