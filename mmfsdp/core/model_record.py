"""Remember of a model what is needed between two calls, its plan first. Imports no torch.

The record is kept beside the model, not in attributes of it. A model may hand attributes of an inner model through
(`__getattr__`), and would then answer with what belongs to the inner one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from .plan import WrapPlan


@dataclass(frozen=True)
class CheckedParameters:
    """Hold what `check_step` has looked at. It holds no tensor, which could keep the model in memory."""

    state: list[int]
    """Identities of all parameters, of those that train, and of those in the optimizer. The check is done again only
    after a change of these."""
    names: dict[int, str]
    """Name of each parameter before wrapping, by its identity."""


@dataclass
class ModelRecord:
    """Hold what the package remembers about one model."""

    plan: WrapPlan | None = None
    """The plan that it was wrapped by; None for a model that others wrapped."""
    keeps_gathered: bool = False
    """`keep_gathered` is active: forwards without gradients leave its units gathered."""
    first_step_checked: bool = False
    """`train_step` has compared the ranks' batches and linted the loss of its first step."""
    checked: CheckedParameters | None = None
    """The parameters that `train_step` has compared with its optimizer; None before its first step."""
    parts_watch: Any = None
    """Of `train_step`: notes which parts a step uses; see same_parts.py."""
    frozen_norms: WeakSet[Any] | None = None
    """Batch norms of frozen parts, which `train_step` looks at; None before its first step."""
    step_failed: bool = False
    """An error has stopped a micro-batch of `train_step`, and the gradients of its step have not been dropped yet."""


_records: WeakKeyDictionary[Any, ModelRecord] = WeakKeyDictionary()


def record_of(model: Any) -> ModelRecord:
    """Return the record of a model; a new one the first time. `torch.compile` around a model shares the model's."""
    return _records.setdefault(uncompiled(model), ModelRecord())


def plan_of(model: Any) -> WrapPlan | None:
    """Return the plan that a model was wrapped by, or None."""
    record = _records.get(uncompiled(model))
    return None if record is None else record.plan


def note_plan(model: Any, plan: WrapPlan) -> None:
    """Begin a new record of a model that was wrapped by a plan now."""
    _records[uncompiled(model)] = ModelRecord(plan)


def uncompiled(model: Any) -> Any:
    """Return the model that `torch.compile(model)` compiles; any other model is returned as it is."""
    # By the registered child: asking for the attribute, a model may hand an inner model's through.
    children = vars(model)["_modules"]
    while "_orig_mod" in children:
        model = children["_orig_mod"]
        children = vars(model)["_modules"]
    return model
