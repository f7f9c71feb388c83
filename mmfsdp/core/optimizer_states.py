"""An optimizer by its name or by the import path of a person's own, and the memory that its states take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..params import OptimizerKind, TrainParams
from ..params.own import OwnCode, OwnCodeError, call_own, own_errors, path_of

FIELD = "train.optimizer"
SIDE = 64
"""Of the matrix whose states are counted: large enough that a number for a step, or for a row, counts for little."""


def optimizer_of(choice: OptimizerKind | OwnCode, groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    """Return the optimizer of groups of parameters, each with its `lr` and `weight_decay`.

    choice: the value of `train.optimizer`. Raises OwnCodeError for a person's own that cannot be imported, that fails,
    or that returns something else.
    """
    if isinstance(choice, OptimizerKind):
        return choice.load()(groups, lr=lr)
    returned = call_own(FIELD, choice, groups, lr=lr)
    if not isinstance(returned, Optimizer):
        words = f"{path_of(choice)} returned a {type(returned).__name__}; return a torch.optim.Optimizer"
        raise OwnCodeError(FIELD, words)
    return returned


def optimizer_states(choice: OptimizerKind | OwnCode) -> float:
    """Return the bytes that an optimizer keeps for each byte of a parameter; a person's own is tried on a matrix."""
    return choice.states if isinstance(choice, OptimizerKind) else counted_states(choice)


def kept_states(train: TrainParams) -> float:
    """Return the bytes that a training keeps for each byte of a parameter: the optimizer's states, and an average."""
    return optimizer_states(train.optimizer) + (train.ema is not None)


def counted_states(choice: OptimizerKind | OwnCode) -> float:
    """Take a step on a matrix, and return the bytes of the states that it has left for each byte of the matrix."""
    with torch.random.fork_rng(devices=()):  # a plan leaves the caller's random states alone
        matrix = nn.Parameter(torch.ones(SIDE, SIDE))
        optimizer = optimizer_of(choice, [{"params": [matrix], "weight_decay": 0.0, "lr": 1e-3}], lr=1e-3)
        matrix.grad = torch.ones_like(matrix)
        with own_errors(FIELD, "a step on a matrix raised"):
            optimizer.step()
    kept = 0
    for value in optimizer.state[matrix].values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:  # not the number of the step
            kept += value.nbytes
    return kept / matrix.nbytes
