"""Cast for mixed precision: what a module computes in one dtype needs inputs, or weights, of that dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ..params import FSDPParams


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
    casts = fsdp.autocast_precision is not None
    if fsdp.effective_backend.rules.shards:
        casts = fsdp.mixed_precision is not None or fsdp.frozen_precision is not None
    if not casts:
        return
    for module in model.modules():
        dtypes = [p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()]
        if dtypes:
            module.register_forward_pre_hook(partial(cast_inputs, dtypes[0]), with_kwargs=True)


def cast_batch_norms(model: nn.Module, fsdp: FSDPParams) -> None:
    """Have each batch norm use its weights in the dtype of its running statistics, in place.

    Weights are gathered in bf16, statistics are buffers and stay fp32: torch 2.11 refuses the mix
    (github.com/pytorch/torchtitan/issues/674; a unit of its own in fp32, as advised there, would be gathered apart).
    """
    if fsdp.mixed_precision or fsdp.frozen_precision:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.affine and module.running_mean is not None:
                module.forward = partial(batch_norm, module, module.forward)  # type: ignore[method-assign]


def batch_norm(module: _BatchNorm, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a batch norm's forward with its weights cast to the dtype of its statistics.

    Until it returns, the module's `weight` and `bias` are the casts; its registered parameters do not change.
    """
    attributes = vars(module)
    views: dict[str, Any] = {key: attributes[key] for key in ("weight", "bias") if key in attributes}  # of FSDP1
    for key in ("weight", "bias"):
        # An attribute of the instance hides the registered parameter.
        attributes[key] = getattr(module, key).to(module.running_mean.dtype)  # type: ignore[union-attr]
    try:
        return forward(x)
    finally:
        for key in ("weight", "bias"):
            del attributes[key]
        attributes.update(views)
