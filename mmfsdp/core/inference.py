"""Evaluate and generate: a forward that no backward follows leaves every unit sharded, as between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, register_fsdp_forward_method
from torch.distributed.fsdp._runtime_utils import _reshard

from ..params import Backend, ParamError
from . import fsdp1
from .model_record import record_of
from .plan import WrapPlan


def reshard_without_gradients(wrapped: nn.Module) -> None:
    """Have each forward under `torch.no_grad()` leave the wrapped model sharded, as it was before.

    After forward, FSDP keeps the root and other units gathered for a backward. If none follows, `parameters()` of FSDP2
    lists whole tensors, which an optimizer must not be given, and the next forward uses the gathered weights again,
    even after an optimizer step.
    """
    lengths: list[int] = []  # of the order of forward, when the forward began

    def before_forward(*_: Any) -> None:
        is_first = isinstance(wrapped, FSDPModule) and wrapped._get_fsdp_state()._is_root is None
        if is_first and torch.is_inference_mode_enabled():
            # FSDP2 would keep tensors that it allocates there, and training cannot use those.
            problem = "its first forward cannot be under torch.inference_mode(); use torch.no_grad()"
            raise ParamError("model", problem)
        lengths[:] = [len(forward_order(wrapped))]

    def after_forward(*_: Any) -> None:
        if not torch.is_grad_enabled() and not record_of(wrapped).keeps_gathered:
            reshard(wrapped, order_length=lengths[0])

    wrapped.register_forward_pre_hook(before_forward)
    wrapped.register_forward_hook(after_forward)


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Let forwards under `torch.no_grad()` share what they gather: one for each token, or batch. Reshard at the end.

    The weights must not change inside.
    """
    record = record_of(model)
    if record.keeps_gathered:  # inside another one, which reshards at its end
        yield
        return
    length = len(forward_order(model))
    record.keeps_gathered = True
    try:
        yield
    finally:
        record.keeps_gathered = False
        reshard(model, order_length=length)


def reshard(model: nn.Module, *, order_length: int = 0) -> None:
    """Free what forwards without a backward left unsharded, so that the next step gathers as every other does.

    order_length: entries of FSDP2's order of forward that a later backward still needs.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups = parameter_groups(module)
            if any(group._all_gather_result is not None for group in groups):
                module.unshard()  # ends an all-gather that was started ahead of need for a forward that never came
            module.reshard()
            # torch 2.11 clears the order of forward in backward only; it would set the next backward's prefetch.
            del forward_order(module)[order_length:]
            for group in groups:
                group._post_forward_indices[:] = [i for i in group._post_forward_indices if i < order_length]
        elif isinstance(module, FullyShardedDataParallel) and module._is_root is not None:  # None: has never run
            # torch 2.11: FSDP1 has no public call for this.
            handle = module._handle
            # Each call adds an event to the rate limiter of all-gathers, so call it only if there is something to free.
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                _reshard(module, handle, True)


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of parameters of a module: one, or several on several meshes in newer torch versions."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def forward_order(model: nn.Module) -> list[Any]:
    """Return the list in which FSDP2 notes the units that ended forward; empty for others."""
    if not isinstance(model, FSDPModule):
        return []
    return getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", [])  # not there before the first forward


def serve_generate(wrapped: nn.Module, model: nn.Module, plan: WrapPlan, device: torch.device) -> None:
    """Give the wrapped model a `generate` that gathers what it needs and leaves every unit sharded."""
    if not hasattr(model, "generate"):
        return
    if plan.backend is Backend.FSDP2:
        register_fsdp_forward_method(model, "generate")
    unsharded: Callable[..., Any] = model.generate  # type: ignore[assignment]
    if plan.backend is Backend.FSDP1:
        unsharded = partial(fsdp1.generate, wrapped, plan, device)  # type: ignore[arg-type]

    @wraps(model.generate)  # type: ignore[arg-type]
    def generate(*args: Any, **kwargs: Any) -> Any:
        with keep_gathered(wrapped):  # a forward for each token
            return unsharded(*args, **kwargs)

    wrapped.generate = generate  # type: ignore[assignment]
