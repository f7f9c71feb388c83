"""silu(gate) * up and its gradients on a GPU, in one kernel each: 3 and 5 tensors are moved, and not 5 and 9.

This imports triton, which comes with torch's builds for CUDA and compiles a kernel at its first launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Numbers that one program computes: 8 for each of its 128 threads, which in 16 bits are read at once."""


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., D), computed in fp32."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    with torch.cuda.device_of(gate):  # triton launches on the current GPU
        _forward[_grid(gate)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and of up, both (..., D), computed in fp32."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        _backward[_grid(gate)](grad, gate, up, grad_gate, grad_up, gate.numel(), BLOCK=BLOCK)
    return grad_gate, grad_up


def _grid(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


@triton.jit
def _forward(gate, up, out, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # there may be more than 2^31
    inside = place < numel
    g = tl.load(gate + place, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0).to(tl.float32)
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    d = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    of_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, (d * g * sigmoid).to(grad_up.dtype.element_ty), mask=inside)
