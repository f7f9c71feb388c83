"""fuse_swiglu: have the activation of gated MLPs run as one kernel each way, and keep a third less for backward.

An MLP of Llama's kind computes down(silu(gate(x)) * up(x)). Written out, autograd keeps the outputs of gate, of silu
and of up, and two operators forward and three backward read and write them. Here it keeps those of gate and up alone,
and computes silu a second time in backward. A CPU's results are the same bits. A GPU's in 16 bits are nearer to fp64,
since its kernel rounds once.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from itertools import permutations
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.fake_tensors import aten
from .fused_classes import exchange_classes


def fuse_swiglu(model: nn.Module) -> list[str]:
    """Have each gated MLP of a model with silu compute its activation at once, in place; call it before wrapping.

    A module is one if it holds three linear layers, of any class, and nothing else with parameters, and returns
    down(silu(gate(x)) * up(x)) for random numbers. Those with another activation, such as Gemma's, stay as they are.

    Args:
        model: The model, with or without weights. Parameters keep their names.

    Returns:
        The names of the modules that were changed.
    """
    return exchange_classes(model, FusedSwiGLU, _mlp_attributes)


def _mlp_attributes(module: nn.Module) -> dict[str, Any] | None:
    layers = gate_up_down(module)
    return None if layers is None else {"gate_up_down": layers}


class FusedSwiGLU(nn.Module):
    """A gated MLP whose activation is one kernel; before its own class among the bases of an MLP that was fused."""

    gate_up_down: tuple[str, str, str]
    """Names of its linear layers."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if torch.compiler.is_compiling():  # it fuses them by itself
            return super().forward(hidden_states)  # type: ignore[no-any-return, misc]
        gate, up, down = (self.get_submodule(name) for name in self.gate_up_down)
        return down(fused_swiglu(gate(hidden_states), up(hidden_states)))  # type: ignore[no-any-return]


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., D), and keep these two for backward."""
    if gate.dtype != up.dtype:  # adapters in another format on one of them
        return nn.functional.silu(gate) * up
    return _OneOperator.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


def gate_up_down(module: nn.Module) -> tuple[str, str, str] | None:
    """Return the names of the gate, up and down layers of a gated MLP with silu; None for a module that is none."""
    layers: list[str] = []
    for name, child in module.named_children():
        if hasattr(child, "in_features") and hasattr(child, "out_features"):  # also those of PEFT, and quantized ones
            layers.append(name)
        elif list(child.parameters()):
            return None
    if len(layers) != 3 or module._parameters or module._buffers or "forward" in vars(module):
        return None
    for names in permutations(layers):
        if _computes_swiglu(module, names):
            return names  # type: ignore[return-value]  # there are three
    return None


def _computes_swiglu(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Tell whether the module's own forward is a SwiGLU of these layers, by one with few weights in their places."""
    generator = torch.Generator().manual_seed(0)
    small = copy.copy(module)
    small._modules = {}
    with torch.device("cpu"), torch.no_grad():
        for name, child in module.named_children():
            if name not in names:
                small._modules[name] = copy.deepcopy(child)
        weights = []
        for name, (rows, columns) in zip(names, ((5, 3), (5, 3), (3, 5)), strict=True):
            weights.append(torch.randn(rows, columns, generator=generator))
            layer = nn.Linear(columns, rows, bias=False, device="meta")  # draws no random numbers of torch's generator
            layer.weight = nn.Parameter(weights[-1])
            small._modules[name] = layer
        small.train()  # a dropout shows itself
        inputs = torch.randn(2, 4, 3, generator=generator)
        try:
            found = small(inputs)
        except (TypeError, RuntimeError, ValueError, AttributeError):  # its forward takes, or asks for, something else
            return False
        gate, up, down = weights
        expected = (nn.functional.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4)


class _OneOperator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        kernel = _kernel_for(gate)
        return kernel.forward(gate, up) if kernel else swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        kernel = _kernel_for(gate)
        return kernel.backward(grads[0], gate, up) if kernel else swiglu_backward(grads[0], gate, up)


# ---- as one operator on any device, by plain ones: what a plan counts, and what runs on a CPU ----


@torch.library.custom_op("mmfsdp::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., D), with the bits that the two operators give."""
    out = _like(gate)
    aten.silu.out(gate, out=out)
    return out.mul_(up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like(gate)


@torch.library.custom_op("mmfsdp::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and of up, both (..., D). There are no other tensors meanwhile."""
    grad_gate, grad_up = _like(gate), _like(up)
    torch.mul(grad, up, out=grad_gate)
    aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    aten.silu.out(gate, out=grad_up)
    return grad_gate, grad_up.mul_(grad)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(up)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


# ---- on a GPU ----


def _kernel_for(tensor: Tensor) -> ModuleType | None:
    if not tensor.is_cuda or tensor.dtype is torch.float64:
        return None
    return _kernel(tensor.device, tensor.dtype)


@cache  # the first launch compiles it
def _kernel(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the file of the fused kernels; None, with a warning, if triton cannot compile or run them here."""
    try:
        from . import swiglu_kernel

        one = torch.ones(1, dtype=dtype, device=device)
        swiglu_kernel.backward(swiglu_kernel.forward(one, one), one, one)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no triton, C compiler, header of Python, or support of this GPU: each has its own
        warnings.warn(
            "model.fused_swiglu: the activation runs as plain operators, which take less memory but no less time than "
            f"written out, since triton cannot run a kernel here ({type(error).__name__}: {str(error)[:200]}); install "
            "what it names",
            stacklevel=2,
        )
        return None
    return swiglu_kernel
