"""Shapes of what a module gives, by running it on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def output_shape(module: nn.Module, example: torch.Tensor) -> torch.Size:
    """The shape of `module(example)`; costs neither memory nor arithmetic, whatever device the module is on."""
    return on_meta(module, torch.empty_like(example, device="meta")).shape


@torch.no_grad()
def on_meta(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What `module(*args, **kwargs)` gives with its tensors on the meta device, as the arguments' must be."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return functional_call(module, empty, args, kwargs)
