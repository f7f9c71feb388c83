"""An optimizer by its name or by the import path of a person's own, and the memory that its states take."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..own.calls import OwnCodeError, call_own, load_own, own_errors
from ..params import OptimizerKind, ParamError, TrainParams
from ..params.own import OwnCode, path_of
from .plan import Param, WrapPlan

READ_BY_KERNELS = ("grad_scale", "found_inf")
"""Attributes of an optimizer that its fused kernels read in a step, if they are there."""

FIELD = "train.optimizer"
CLOSURE = (
    "needs a closure, by which it computes loss and gradients several times in a step; a step here has one backward, "
    "so choose an optimizer with step() alone: adamw, muon, torch.optim:SGD"
)
SIDE = 64
"""Side of the matrix whose states are counted: large enough that a number for a step, or for a row, counts for
little."""
MAX_DIFFERENCE = 1e-2
"""Relative difference between the change of two halves and the change of the whole that rounding may cause."""


def optimizer_of(choice: OptimizerKind | OwnCode, groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    """Return the optimizer of groups of parameters, each with its `lr` and `weight_decay`.

    choice: the value of `train.optimizer`. Raises OwnCodeError for a person's own that cannot be imported, that fails,
    or that returns something else.
    """
    if isinstance(choice, OptimizerKind):
        return choice.load()(groups, lr=lr)
    if needs_closure(load_own(FIELD, choice)):
        raise OwnCodeError(FIELD, f"{path_of(choice)} {CLOSURE}")
    returned = call_own(FIELD, choice, groups, lr=lr)
    if needs_closure(type(returned)):
        raise OwnCodeError(FIELD, f"{path_of(choice)} returned a {type(returned).__name__}, which {CLOSURE}")
    if not isinstance(returned, Optimizer):
        words = f"{path_of(choice)} returned a {type(returned).__name__}; return a torch.optim.Optimizer"
        raise OwnCodeError(FIELD, words)
    return returned


def needs_closure(optimizer: Any) -> bool:
    """Return True for a class of optimizers whose step cannot be called without a closure, such as torch's LBFGS."""
    if not inspect.isclass(optimizer) or not issubclass(optimizer, Optimizer):
        return False
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def optimizer_states(choice: OptimizerKind | OwnCode) -> float:
    """Return the bytes that an optimizer keeps for each byte of a parameter; a person's own is tried on a matrix."""
    return choice.states if isinstance(choice, OptimizerKind) else counted_states(choice)


def gathered_bytes(choice: OptimizerKind | OwnCode) -> int:
    """Return the bytes of each element of a sharded matrix that an optimizer gathers in a step; 0 if it gathers none.

    A person's own says so by an attribute, `gathers`.
    """
    if isinstance(choice, OptimizerKind):
        return choice.gathers
    optimizer = optimizer_of(choice, [group_of(nn.Parameter(torch.ones(SIDE, SIDE)))], lr=1e-3)
    return max(getattr(each, "gathers", 0) for each in getattr(optimizer, "optimizers", [optimizer]))


def kept_states(train: TrainParams) -> float:
    """Return the bytes that a training keeps for each byte of a parameter: the optimizer's states, and an average."""
    return optimizer_states(train.optimizer) + (train.ema is not None)


def counted_states(choice: OptimizerKind | OwnCode) -> float:
    """Take a step on a matrix, and return the bytes of the states that it has left for each byte of the matrix."""
    with torch.random.fork_rng(devices=()):  # a plan leaves the caller's random states alone
        matrix = nn.Parameter(torch.ones(SIDE, SIDE))
        optimizer = optimizer_of(choice, [group_of(matrix)], lr=1e-3)
        matrix.grad = torch.ones_like(matrix)
        with own_errors(FIELD, "a step on a matrix raised"):
            optimizer.step()
    kept = 0
    for value in optimizer.state[matrix].values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:  # not the number of the step
            kept += value.nbytes
    return kept / matrix.nbytes


def group_of(*matrices: nn.Parameter) -> dict[str, Any]:
    """Return a group of matrices, as a training gives it to an optimizer."""
    return {"params": list(matrices), "weight_decay": 0.0, "lr": 1e-3, "matrices": True}


def changes_elements_alone(choice: OptimizerKind | OwnCode) -> bool:
    """Return True if an optimizer changes each element of a matrix by its own gradients, as AdamW and SGD do.

    It is tried: two steps on a matrix, and on its two halves. Muon, Adafactor, LAMB and Shampoo change an element by
    the whole matrix, so that a rank with some of its rows would change it wrongly.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        scales = torch.cat((torch.ones(SIDE // 2, 1), torch.full((SIDE // 2, 1), 30.0)))  # halves of other norms
        begin, gradient = torch.randn(SIDE, SIDE) * scales, torch.randn(SIDE, SIDE) * scales.flip(0)
        ends = []
        for parts in (1, 2):
            pieces = [nn.Parameter(piece.clone()) for piece in begin.chunk(parts)]
            optimizer = optimizer_of(choice, [group_of(*pieces)], lr=1e-3)
            for _ in range(2):
                for piece, its_gradient in zip(pieces, gradient.chunk(parts), strict=True):
                    piece.grad = its_gradient.clone()
                with own_errors(FIELD, "a step on a matrix raised"):
                    optimizer.step()
            ends.append(torch.cat([piece.detach() for piece in pieces]) - begin)
    whole, halves = ends
    return bool((whole - halves).norm() <= MAX_DIFFERENCE * whole.norm())


def check_shards(choice: OptimizerKind | OwnCode, plan: WrapPlan) -> None:
    """Raise ParamError if an optimizer needs whole matrices, and the ranks of a plan hold shards that it cannot gather.

    An optimizer that gathers matrices by itself says so by an attribute: `gathers_up_to`, the elements of the largest.
    """
    sharded: list[Param] = []
    for unit in plan.sharded_units:
        sharded += [p for p in unit.params if p.trainable and len(p.shape) == 2]
    if plan.shard == 1 or not sharded or changes_elements_alone(choice):
        return
    name = str(choice) if isinstance(choice, OptimizerKind) else path_of(choice)
    words = f"{name} changes an element by its whole matrix, and a rank holds a shard of {sharded[0].name}; "
    if plan.rules.flat:
        raise ParamError(FIELD, f"{words}{plan.backend}'s shards are flat: set fsdp.backend to FSDP2 or DDP")
    optimizer = optimizer_of(choice, [group_of(nn.Parameter(torch.ones(SIDE, SIDE)))], lr=1e-3)
    limits = [getattr(each, "gathers_up_to", 0) for each in getattr(optimizer, "optimizers", [optimizer])]
    limit = max(limits)
    if not limit:
        raise ParamError(FIELD, f"{words}set fsdp.backend to DDP, or take mmfsdp.kit.train.muon:Muon, which gathers it")
    for p in sharded:
        if p.decays and p.numel > limit:
            raise ParamError(
                FIELD,
                f"{name} gathers one matrix at a time, of up to {limit:,} elements, and {p.name} has {p.numel:,}; "
                "freeze it, or choose adamw",
            )
