"""Cast inputs for mixed precision: what a module computes in one dtype needs inputs of that dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..params import Backend, FSDPParams


def cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a module's inputs with floating-point tensors in another dtype, as FSDP casts them. A forward pre-hook."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, (args, kwargs))


def cast_to_weights(model: nn.Module, fsdp: FSDPParams) -> None:
    """Have each module cast its inputs to the dtype of its weights, if a wrapped model would cast them. In place.

    For a forward before there are units. FSDP casts the inputs of a unit, and autocast those of a matrix product; so
    a model whose weights are in 16 bits takes inputs in fp32 only after it is wrapped.
    """
    if fsdp.effective_backend is Backend.DDP:
        casts = fsdp.autocast_precision is not None
    else:
        casts = fsdp.mixed_precision is not None or fsdp.frozen_precision is not None
    if not casts:
        return
    for module in model.modules():
        dtypes = [p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()]
        if dtypes:
            module.register_forward_pre_hook(partial(cast_inputs, dtypes[0]), with_kwargs=True)
