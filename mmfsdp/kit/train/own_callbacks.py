"""A person's own callbacks, `train.callbacks`: objects of any class with some of the methods of METHODS."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.plain import NotPlain, from_json, to_json
from ...checkpoint.tensors import read_parameter
from ...own.calls import OwnCodeError, call_own, check_call, own_errors
from ...params import RunParams
from ...params.base import did_you_mean, without_controls
from ...params.own import OwnCode, path_of
from .callbacks import Callback, Training

FIELD = "train.callbacks"
ARGUMENTS = {
    "on_train_begin": ("training",),  # or without it
    "on_step_end": ("row",),
    "on_evaluate": ("scores",),
    "on_save": ("step",),
    "on_train_end": ("result",),
}
METHODS = tuple(ARGUMENTS)
"""The methods that are called where a callback has them."""
MAX_REASON = 300
"""Letters of a callback's reason to stop."""


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
    if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
        raise OwnCodeError(FIELD, f"{path} has one of state_dict and load_state_dict; a state needs both")
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
    error = _why_not_called(callback, name, arguments)
    if error and not (name == "on_train_begin" and not _why_not_called(callback, name, ())):
        words = f"{path}.{name} is called as {name}({', '.join(arguments)}), which it does not take: {error}"
        raise OwnCodeError(FIELD, words)


def _why_not_called(callback: Any, name: str, arguments: tuple[str, ...]) -> str:
    """Return why a method of a callback, or of its class, cannot be called with so many arguments; "" if it can."""
    method = inspect.getattr_static(callback, name)
    bound = isinstance(method, (staticmethod, classmethod)) or not inspect.isclass(callback)
    try:
        inspect.signature(getattr(callback, name)).bind(*(() if bound else ("self",)), *arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # of no Python function
        return ""
    return ""


OURS_ONLY = ("around_step", "after_step", "due")
"""Methods of the package's own callbacks, which a person's may not have: a class that inherits ours would."""


def own_callbacks(training: Training) -> Callback | None:
    """Make the own callbacks of a run, if it has any."""
    values = training.setup.params.train.callbacks
    return OwnCallbacks(training, values) if values else None


class TrainingView:
    """A training, as a person's callback sees it: `on_train_begin(training)` gets one."""

    def __init__(self, training: Training, path: str) -> None:
        """path: the import path of the callback."""
        self._training = training
        self._path = path

    @property
    def model(self) -> nn.Module:
        """The wrapped model. This rank's parameters are shards, unless the backend is DDP."""
        return self._training.setup.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, of this rank's shards of what trains."""
        return self._training.setup.optimizer

    @property
    def params(self) -> RunParams:
        """The parameters of the run."""
        return self._training.setup.params

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""
        return self._training.state.step

    def parameter(self, name: str) -> torch.Tensor:
        """Return a copy of a whole parameter. Every rank must call it, with the same name.

        name: before wrapping, as `model.freeze` has it. Raises ParamError for a name that there is not.
        """
        return read_parameter(self.model, name)

    def stop(self, reason: str) -> None:
        """End the run in good order after the next step: all ranks save, and the run is completed.

        One rank may call it alone: the others learn it in the next step. reason: in words, for the run's state.
        """
        words = " ".join(without_controls(str(reason)).split())[:MAX_REASON]
        self._training.stop_asked = self._training.stop_asked or f"{self._path}: {words}"


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
        """Begin, before the first step. A method with an argument gets the training to look at."""
        for path, callback in self._callbacks:
            if not hasattr(callback, "on_train_begin"):
                continue
            self._beat(f"{path}.on_train_begin")
            takes = not _why_not_called(callback, "on_train_begin", ARGUMENTS["on_train_begin"])
            with own_errors(FIELD, f"{path}.on_train_begin raised"):
                callback.on_train_begin(*([TrainingView(self._training, path)] if takes else []))

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

    def state_dict(self) -> dict[str, Any] | None:
        """Return the states of those that have one, by import path."""
        states = {}
        for name, path, callback in self._with_state():
            self._beat(f"{path}.state_dict")
            with own_errors(FIELD, f"{path}.state_dict raised"):
                state = callback.state_dict()
            try:
                states[name] = to_json(state)
            except NotPlain as error:
                words = f"{path}.state_dict returned {error}, which a checkpoint cannot hold; return numbers, texts, "
                raise OwnCodeError(FIELD, f"{words}lists, dicts and small tensors") from None
        return states or None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand over the states that they had."""
        for name, path, callback in self._with_state():
            if name in state:
                self._beat(f"{path}.load_state_dict")
                with own_errors(FIELD, f"{path}.load_state_dict raised"):
                    callback.load_state_dict(from_json(state[name]))

    def close(self) -> None:
        """Close those that can be closed, also after an error."""
        for path, callback in self._callbacks:
            if callable(getattr(callback, "close", None)):
                with own_errors(FIELD, f"{path}.close raised"):
                    callback.close()

    def _with_state(self) -> Iterator[tuple[str, str, Any]]:
        """Yield a name in checkpoints, the import path and the callback of each that keeps a state."""
        used: Counter[str] = Counter()
        for path, callback in self._callbacks:
            used[path] += 1
            if hasattr(callback, "state_dict"):
                yield f"{path} {used[path]}", path, callback

    def _beat(self, method: str, at: str = "") -> None:
        step = self._training.state.step
        self._training.beat(f"{at or (f'step {step}' if step else 'taking up')} callback {method}")

    def _call(self, method: str, *args: Any) -> None:
        for path, callback in self._callbacks:
            if hasattr(callback, method):
                self._beat(f"{path}.{method}", "trained" if method == "on_train_end" else "")
                with own_errors(FIELD, f"{path}.{method} raised"):
                    getattr(callback, method)(*copy.deepcopy(args))
