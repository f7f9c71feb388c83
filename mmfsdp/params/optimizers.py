"""OptimizerKind: the optimizers by name, and the type of a field that names one, or a person's own by its path."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from .base import did_you_mean
from .enums import Choice, Schedule
from .own import EXAMPLE, OwnCode, check_own


class OptimizerKind(Choice):
    """The optimizer. A new one is an entry here and a function that builds it; see kit/train/optimizer.py."""

    states: float
    """Tensors as large as a parameter, and of its dtype, that it keeps for each: memory is predicted from this."""
    gathers: int
    """Bytes of each element of a sharded matrix that it gathers in a step: traffic is predicted from this."""

    ADAMW = (
        "adamw",
        "Adam with decoupled weight decay (Loshchilov and Hutter 2019); keeps two moments.",
        "mmfsdp.kit.train.optimizer:adamw",
        2.0,
        0,
    )
    MUON = (
        "muon",
        "Muon for matrices (Jordan 2024; Liu et al. 2025), which keeps one moment; adamw for embeddings and all else.",
        "mmfsdp.kit.train.muon:muon",
        2.0,  # of adamw, the most that it keeps for a parameter
        2,  # in bf16
    )


def check_name_or_own(names: type[Choice], value: Any) -> Any:
    """Return the value if it is one of these names or an import path. Raises ValueError."""
    if isinstance(value, dict) or (isinstance(value, str) and ":" in value):
        return check_own(value)
    known = [str(name) for name in names]
    if value in known:
        return value
    raise ValueError(f"{value!r} is not allowed{did_you_mean(str(value), known)}; or give your own: {EXAMPLE}")


Optimizer = Annotated[OptimizerKind | OwnCode, BeforeValidator(partial(check_name_or_own, OptimizerKind))]
"""Type of a field that names an optimizer: one of ours, or a person's own."""
LearningRateSchedule = Annotated[Schedule | OwnCode, BeforeValidator(partial(check_name_or_own, Schedule))]
"""Type of a field that names a schedule: one of ours, or a person's own."""
