"""OptimizerKind: the optimizers by name, and the type of a field that names one, or a person's own by its path."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from .base import did_you_mean
from .enums import Choice
from .own import EXAMPLE, OwnCode, check_own


class OptimizerKind(Choice):
    """The optimizer. A new one is an entry here and a function that builds it; see train/optimizer.py."""

    states: float
    """Tensors as large as a parameter, and of its dtype, that it keeps for each: memory is predicted from this."""

    ADAMW = (
        "adamw",
        "Adam with decoupled weight decay (Loshchilov and Hutter 2019); keeps two moments.",
        "mmfsdp.train.optimizer:adamw",
        2.0,
    )


def check_optimizer(value: Any) -> Any:
    """Return the value if it is a name of an optimizer or an import path. Raises ValueError."""
    if isinstance(value, dict) or (isinstance(value, str) and ":" in value):
        return check_own(value)
    names = [str(name) for name in OptimizerKind]
    if value in names:
        return value
    raise ValueError(f"{value!r} is not allowed{did_you_mean(str(value), names)}; or give your own: {EXAMPLE}")


Optimizer = Annotated[OptimizerKind | OwnCode, BeforeValidator(check_optimizer)]
"""Type of a field that names an optimizer: one of ours, or a person's own."""
