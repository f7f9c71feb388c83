"""fuse_norms: have the RMS norms of a model run as one kernel on a GPU, in place of a dozen operators in fp32.

transformers writes them out: a cast to fp32, a square, a mean, a root, two products and a cast back, each of which
reads and writes all activations. `torch.nn.functional.rms_norm` is one kernel, and in 16 bits it is nearer to fp64,
since it rounds once. Its results differ from transformers' in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.fake_tensors import copy_with
from .fused_classes import exchange_classes


def fuse_norms(model: nn.Module) -> list[str]:
    """Have each RMS norm of a model compute by torch's fused kernel, in place; call it before wrapping.

    A module is one if it has a weight of one dim and nothing else, and returns what `torch.nn.functional.rms_norm`
    returns for random numbers, so that variants such as Gemma's, which multiplies by 1 + weight, stay as they are.

    Args:
        model: The model, with or without weights. Parameters keep their names.

    Returns:
        The names of the modules that were changed.
    """
    return exchange_classes(model, FusedRMSNorm, _norm_attributes)


def _norm_attributes(module: nn.Module) -> dict[str, Any] | None:
    eps = None if isinstance(module, nn.RMSNorm) else eps_of(module)
    return None if eps is None else {"fused_eps": eps}


class FusedRMSNorm(nn.Module):
    """An RMS norm whose forward is one kernel; before its own class among the bases of a norm that was fused."""

    weight: nn.Parameter
    fused_eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if hidden_states.dtype != self.weight.dtype:  # the kernel takes one dtype; under autocast there may be two
            return super().forward(hidden_states)  # type: ignore[no-any-return, misc]
        if hidden_states.is_cuda:
            return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.fused_eps)
        return _OneOperator.apply(hidden_states, self.weight, self.fused_eps)  # type: ignore[no-untyped-call]


def eps_of(module: nn.Module) -> float | None:
    """Return the number that an RMS norm adds to the mean of squares; None for a module that is none."""
    tensors = [p for p in (*module._parameters.values(), *module._buffers.values()) if p is not None]
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    weight = module._parameters.get("weight")
    if module._modules or len(tensors) != 1 or len(numbers) != 1 or weight is None:
        return None
    if weight.ndim != 1 or not weight.is_floating_point():
        return None
    generator = torch.Generator().manual_seed(0)

    def random(_: str, tensor: Tensor) -> Tensor:
        return nn.Parameter(torch.rand(tensor.shape, generator=generator) + 0.5)

    with torch.device("cpu"), torch.no_grad():
        copy = copy_with(module, random)
        inputs = torch.randn(2, len(weight), generator=generator)
        try:
            found = copy(inputs)
        except (TypeError, RuntimeError, ValueError):  # its forward takes something else
            return None
        expected = nn.functional.rms_norm(inputs, weight.shape, copy.get_parameter("weight"), numbers[0])
    same = isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5)
    return numbers[0] if same else None


# ---- the same on the CPU: one operator, and the tensors that the kernel keeps for backward ----


@torch.library.custom_op("mmfsdp::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x, (..., D), and the inverse root of the mean of squares in fp32, (..., 1)."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype), inverse


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("mmfsdp::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, (..., D), and of the weight, (D,), which is empty unless it is asked for."""
    wide, scaled = x.float() * inverse, grad.float() * weight.float()
    grad_x = inverse * (scaled - wide * (scaled * wide).mean(-1, keepdim=True))
    grad_weight = weight.new_empty(0)
    if of_weight:
        grad_weight = (grad.float() * wide).flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x.to(x.dtype), grad_weight


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_weight: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if of_weight else weight.new_empty(0)


class _OneOperator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        of_weight = ctx.needs_input_grad[1]
        grad_x, grad_weight = rms_norm_backward(grads[0], *ctx.saved_tensors, of_weight)
        return grad_x, grad_weight if of_weight else None, None
