"""Shapes of what a module gives, by running it on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call


def output_shape(module: nn.Module, example: torch.Tensor) -> torch.Size:
    """The shape of `module(example)`; costs neither memory nor arithmetic, whatever device the module is on."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    with torch.no_grad():
        return functional_call(module, empty, (torch.empty_like(example, device="meta"),)).shape
