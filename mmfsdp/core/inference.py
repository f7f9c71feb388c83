"""Evaluate and generate: a forward that no backward follows leaves every unit sharded, as between two steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..params import ParamError
from .model_record import record_of
from .plan import WrapPlan
from .recompute import in_backward
from .reshard import drop_failed_step, forward_order, in_forward, reshard
from .wrapper import Wrapper


def reshard_without_gradients(wrapped: nn.Module) -> None:
    """Have each forward under `torch.no_grad()`, or that an error stops, leave the model sharded, as it was before.

    After forward, FSDP keeps the root and other units gathered for a backward. If none follows, `parameters()` of FSDP2
    lists whole tensors, which an optimizer must not be given, and the next forward uses the gathered weights again,
    even after an optimizer step. The same holds for a forward of a part of the model.
    """
    units: list[nn.Module] = []
    for module in wrapped.modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)) and module is not wrapped:
            units.append(module)
    running: list[nn.Module] = []  # the module that was called from outside, while it runs
    lengths: list[int] = []  # of the order of forward, when it began

    def before_forward(module: nn.Module, *_: Any) -> None:
        if in_backward():  # activation checkpointing runs it again, and may stop it by an exception of its own
            return
        if module is wrapped:
            begin_forward(wrapped, units)
        elif running:
            return
        running[:] = [module]
        lengths[:] = [len(forward_order(wrapped))]

    def after_forward(module: nn.Module, _: Any, output: Any) -> None:
        if not running or module is not running[0]:
            return
        running.clear()
        stopped = output is None  # by an error
        if stopped or (not torch.is_grad_enabled() and not record_of(wrapped).keeps_gathered):
            reshard(module, order_length=lengths[0])

    for module in [wrapped, *units]:
        module.register_forward_pre_hook(before_forward, prepend=True)  # before FSDP's own
        module.register_forward_hook(after_forward, always_call=True)


def begin_forward(wrapped: nn.Module, units: list[nn.Module]) -> None:
    """Prepare the first forward of FSDP2, and end what an error, or a call of a part, has left of an earlier one."""
    if isinstance(wrapped, FSDPModule) and wrapped._get_fsdp_state()._is_root is None:
        if torch.is_inference_mode_enabled():
            # FSDP2 would keep tensors that it allocates there, and training cannot use those.
            problem = "its first forward cannot be under torch.inference_mode(); use torch.no_grad()"
            raise ParamError("model", problem)
        return
    if drop_failed_step(wrapped):
        warnings.warn(
            "an error has stopped a backward or a train_step: all gradients since the last step are dropped",
            stacklevel=2,
        )
    elif record_of(wrapped).keeps_gathered:  # inside `generate`
        return
    elif any(in_forward(module) for module in [wrapped, *units]):
        reshard(wrapped, order_length=len(forward_order(wrapped)))


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


def serve_generate(wrapped: nn.Module, model: nn.Module, plan: WrapPlan, device: torch.device) -> None:
    """Give the wrapped model a `generate` that gathers what it needs and leaves every unit sharded."""
    if not hasattr(model, "generate"):
        return
    wrapper: Wrapper = plan.backend.load()
    unsharded = wrapper.generate(wrapped, model, plan, device)

    @wraps(model.generate)  # type: ignore[arg-type]
    def generate(*args: Any, **kwargs: Any) -> Any:
        with keep_gathered(wrapped):  # a forward for each token
            return unsharded(*args, **kwargs)

    wrapped.generate = generate  # type: ignore[assignment]
