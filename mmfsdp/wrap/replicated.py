"""Frozen units that every rank holds whole: outside FSDP's care, moved and cast here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..plan import WrapPlan
from ..plan.build import torch_dtype


def replicated_params(model: nn.Module, plan: WrapPlan) -> set[nn.Parameter]:
    """The parameters that FSDP must leave alone."""
    return {model.get_parameter(p.name) for unit in plan.units if not unit.sharded for p in unit.params}


def serve_replicated(model: nn.Module, plan: WrapPlan, device: torch.device) -> None:
    """Move replicated parameters to the device, and cast what goes into their modules as FSDP does elsewhere."""
    for unit in plan.units:
        if unit.sharded or not unit.params:
            continue
        for p in unit.params:
            parameter = model.get_parameter(p.name)
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        if plan.fsdp.mixed_precision:
            dtype = torch_dtype(unit.compute_dtype)
            for name in unit.modules:
                model.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, dtype=dtype: cast_floating((args, kwargs), dtype), with_kwargs=True
                )


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors among nested values, in another format."""
    return tree_map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v, values)
