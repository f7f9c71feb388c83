"""The tensors of a wrapped model and its optimizer, by the names that they have in the model before wrapping."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.model_record import plan_of
from ..core.reshard import reshard
from ..params import ParamError
from ..params.base import did_you_mean

Tensors = dict[str, Any]
"""Tensors by name: DTensors of FSDP's shards, plain tensors of what every rank holds."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."
"""Prefix of the states in torch's flat state dict of an optimizer; its other keys are settings."""


def model_tensors(model: nn.Module, *, also: Collection[str] = ()) -> Tensors:
    """Return trainable parameters and buffers, and frozen ones named in `also`; a tied one by its first name."""
    tensors = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    if set(also) - set(tensors):
        wanted = set(tensors) | set(also)
        tensors = {n: t for n, t in get_model_state_dict(model).items() if n in wanted}
    plan = plan_of(model)
    if plan is not None:
        # The plan knows first names: FSDP1's wrapper shows its parameters under other ones.
        return {n: t for n, t in tensors.items() if n not in plan.by_name or plan.by_name[n].name == n}
    first_names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    return {n: t for n, t in tensors.items() if n in first_names}


def trained_tensors(model: nn.Module) -> Tensors:
    """Return the trainable parameters, without buffers; a tied one by its first name."""
    plan = plan_of(model)
    if plan is not None:
        names = {p.name for p in plan.by_name.values()}
    else:
        names = {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model_tensors(model).items() if name in names}


def read_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """Return a copy of a whole parameter or buffer of a wrapped model. Every rank must call it, with the same name.

    name: before wrapping. Raises ParamError for a name that the model does not have.
    """
    reshard(model)
    plan = plan_of(model)
    if plan is not None and name in plan.by_name:
        name = plan.by_name[name].name  # of a tied parameter, the first
    tensors = model_tensors(model, also=(name,))
    if name not in tensors:
        raise ParamError("name", f"the model has no parameter {name!r}{did_you_mean(name, tensors)}")
    tensor = tensors[name].detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def set_model_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Set a model's tensors. Those that are not given stay as they are."""
    logger = logging.getLogger("torch.distributed.fsdp._state_dict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)  # torch 2.11: FSDP1 warns of every tensor that is not given, strict or not
    try:
        set_model_state_dict(model, tensors, options=StateDictOptions(strict=False))
    finally:
        logger.setLevel(level)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Return the optimizer's states as `<parameter>.<state>`. A new optimizer gets states, by a step."""
    tensors = {}
    with groups_with_parameters(optimizer):
        state: Tensors = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    for name, tensor in state.items():
        if name.startswith(_STATE):
            # FSDP1 gives one step counter to all parameters of a unit, and no file may hold a tensor twice.
            tensors[name.removeprefix(_STATE)] = tensor.clone() if tensor.ndim == 0 else tensor
    return tensors


def set_optimizer_tensors(model: nn.Module, optimizer: Optimizer, tensors: Tensors) -> None:
    """Set an optimizer's states. Its settings, such as learning rates, are in settings.py."""
    with groups_with_parameters(optimizer):
        state = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        state |= {_STATE + name: tensor for name, tensor in tensors.items()}
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=_FLAT)


@contextmanager
def groups_with_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Hide an optimizer's groups without parameters, for which torch's functions raise IndexError.

    Afterwards the groups are the same dicts with the same settings: torch replaces them, and a person may hold one.
    """
    groups = optimizer.param_groups
    contents = [dict(group) for group in groups]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, content in zip(groups, contents, strict=True):
            group.clear()
            group.update(content)
        optimizer.param_groups = groups


def local_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
    """Return this rank's flat shards as FSDP1 holds them: `<parameter>`, and the optimizer's `<parameter>//<state>`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach().cpu().clone()
            for key, state in (optimizer.state.get(p, {}) if optimizer else {}).items():
                tensors[f"{name}//{key}"] = state.cpu().clone()
    return tensors
