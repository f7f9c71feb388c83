"""A plan applied as FSDP2: one fully_shard per unit, inner ones first."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils._pytree import tree_leaves

from ..params import BackwardPrefetch
from ..plan import Unit, WrapPlan
from ..plan.build import torch_dtype
from ..plan.cost import ahead_in_forward
from ..plan.ties import inner_first
from .gloo import UnderWay, exchange_by_parts
from .replicated import replicated_params, serve_replicated
from .rest import serve_generate
from .start import Source, hand_out


def wrap_fsdp2(
    model: nn.Module, plan: WrapPlan, *, device: torch.device, mesh: DeviceMesh, weights: Source | None
) -> nn.Module:
    """Shard in place as planned. Returns the model."""
    whole, under_way = replicated_params(model, plan), UnderWay()
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.fsdp.cpu_offload else OffloadPolicy()
    serve_replicated(model, plan, device)
    sharded = [unit for unit in plan.units if unit.sharded]
    for unit in (sharded[i] for i in inner_first([u.modules for u in sharded])[0]):
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_precision(unit, plan),
            offload_policy=offload,
            ignored_params=whole,
        )
        exchange_by_parts(_module(model, unit), mesh, under_way)
    _order_gathers(model, plan, sharded)
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")
        serve_generate(model, model.generate)
    if weights is not None:
        hand_out(model, weights, device=torch.device("cpu") if plan.fsdp.cpu_offload else device, via=device)
    return model


def _depth(unit: Unit) -> int:
    return min(name.count(".") + bool(name) for name in unit.modules)


def _precision(unit: Unit, plan: WrapPlan) -> MixedPrecisionPolicy:
    # reduce_dtype is always given: what None means has changed between versions of torch.
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(unit.compute_dtype) if unit.compute_dtype else None,
        reduce_dtype=plan.fsdp.reduce_dtype.to_torch(),
        cast_forward_inputs=bool(unit.compute_dtype),
    )


def _order_gathers(model: nn.Module, plan: WrapPlan, sharded: list[Unit]) -> None:
    """What is gathered ahead of need, what never in backward, and what stays over accumulated micro-steps."""
    ahead = ahead_in_forward(sharded, plan.fsdp)
    stays = {unit.order for unit in sharded if unit.params and not unit.reshard_after_forward}
    modules = {unit.order: _module(model, unit) for unit in sharded}
    if early := [modules[order] for order in ahead.get(0, ()) if order in stays]:
        model.register_forward_pre_hook(partial(_send_for, early))
    for unit in sharded:
        module = _module(model, unit)
        module.mmfsdp_unit = unit  # type: ignore[attr-defined]  # accumulation must know what to hold
        if unit.params and not unit.grad_flow:
            _never_in_backward(model, unit)
        if plan.fsdp.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
            module.set_modules_to_backward_prefetch([module])  # which is there already; an empty list means default
        if after := [modules[order] for order in ahead.get(unit.order, ()) if order not in stays]:
            module.set_modules_to_forward_prefetch(after)
            if plan.fsdp.activation_checkpointing != "none":
                _only_in_forward(model, unit, after)


def _send_for(early: list[FSDPModule], *_: Any) -> None:
    """Have units on their way, which stay gathered until backward."""
    for module in early:
        module.unshard(async_op=True)


def _only_in_forward(model: nn.Module, unit: Unit, after: list[FSDPModule]) -> None:
    """Gather `after` ahead of need, but not where forward runs again in backward, which is done with it by then."""
    module = _module(model, unit)

    def choose(*_: Any) -> None:
        module.set_modules_to_forward_prefetch(after if torch._C._current_graph_task_id() == -1 else [])

    for name in unit.modules:
        model.get_submodule(name).register_forward_pre_hook(choose, prepend=True)


def _never_in_backward(model: nn.Module, unit: Unit) -> None:
    """Spare the unit's gather in backward; take that back if the plan, made without an example, guessed wrong."""
    module = _module(model, unit)
    module.set_unshard_in_backward(False)

    def check(_: nn.Module, args: Any, kwargs: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            module.set_unshard_in_backward(True)
            warnings.warn(
                f"plan: backward does pass through {unit.name}, so it is gathered there too; "
                "give make_plan an example to have this predicted",
                stacklevel=2,
            )

    for name in unit.modules:
        model.get_submodule(name).register_forward_pre_hook(check, with_kwargs=True)


def _module(model: nn.Module, unit: Unit) -> FSDPModule:
    module = model.get_submodule(unit.modules[0])
    assert isinstance(module, FSDPModule)
    return module
