"""Apply a plan with FSDP2: one `fully_shard` call per unit, inner units first."""

from __future__ import annotations

from collections.abc import Callable
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

from ..params import BackwardPrefetch
from .group import inner_units_first
from .parameters import attributes_by_name, keep_attributes
from .plan import Unit, WrapPlan
from .recompute import in_backward
from .units import torch_dtype
from .wrapper import Fill, Wrapper


def wrap_fsdp2(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device: torch.device,
    mesh: DeviceMesh,
    replicated: set[nn.Parameter],
    fill: Fill,
) -> nn.Module:
    """Shard the model in place, unit by unit, and return it.

    replicated: parameters that FSDP leaves whole. fill: fills modules on the meta device.
    """
    attributes = attributes_by_name(model)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if plan.fsdp.cpu_offload else OffloadPolicy()
    for unit in inner_units_first(plan):
        fill(unit.modules, mesh)
        modules = [model.get_submodule(name) for name in unit.modules]
        # The modules of one call share one all-gather.
        fully_shard(
            modules,
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=mixed_precision(unit, plan),
            offload_policy=offload,
            ignored_params=replicated,  # whole on every rank: neither sharded nor gathered
        )
        # Backward does not need the weights of a unit that it does not pass through, and that does not run again.
        if unit.params and not unit.needed_in_backward:
            fsdp_module(model, unit).set_unshard_in_backward(False)
    set_prefetch(model, plan)
    keep_attributes(model, attributes)
    return model


def mixed_precision(unit: Unit, plan: WrapPlan) -> MixedPrecisionPolicy:
    """Return the unit's dtypes: gathered and computed in compute_dtype, gradients reduced in reduce_dtype."""
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(unit.compute_dtype) if unit.compute_dtype else None,
        # Always explicit: the meaning of None has changed between torch versions.
        reduce_dtype=plan.fsdp.reduce_dtype.to_torch(),
        cast_forward_inputs=bool(unit.compute_dtype),
    )


def set_prefetch(model: nn.Module, plan: WrapPlan) -> None:
    """Set which units FSDP2 gathers ahead of need, as the plan says."""
    for unit in plan.sharded_units:
        module = fsdp_module(model, unit)
        following = plan.prefetched_in_forward.get(unit.order)
        if following is not None:
            prefetch_in_forward_only(model, unit, fsdp_module(model, following))
        if plan.fsdp.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
            # To FSDP2 an empty list means its default order. The unit itself is unsharded by then: a no-op.
            module.set_modules_to_backward_prefetch([module])


def prefetch_in_forward_only(model: nn.Module, unit: Unit, following: FSDPModule) -> None:
    """Gather the following unit when this one begins forward, but not when activation checkpointing runs it again.

    FSDP2 (torch 2.11) prefetches in both. The following unit's backward is over by then: gathered again, it would stay.
    Needed until torch tells the two apart; github.com/NVIDIA-NeMo/Automodel/issues/3373 describes the same.
    """
    module = fsdp_module(model, unit)

    def choose(*_: Any) -> None:
        module.set_modules_to_forward_prefetch([] if in_backward() else [following])

    for name in unit.modules:
        model.get_submodule(name).register_forward_pre_hook(choose, prepend=True)


def fsdp_module(model: nn.Module, unit: Unit) -> FSDPModule:
    """Return the module that stands for a wrapped unit: its first."""
    module = model.get_submodule(unit.modules[0])
    assert isinstance(module, FSDPModule)
    return module


class FSDP2Wrapper(Wrapper):
    """Wraps with `fully_shard`."""

    def wrap(
        self,
        model: nn.Module,
        plan: WrapPlan,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        replicated: set[nn.Parameter],
        fill: Fill,
    ) -> nn.Module:
        """Shard the model in place; see `wrap_fsdp2`."""
        return wrap_fsdp2(model, plan, device=device, mesh=mesh, replicated=replicated, fill=fill)

    def generate(
        self, wrapped: nn.Module, model: nn.Module, plan: WrapPlan, device: torch.device
    ) -> Callable[..., Any]:
        """Return the model's `generate`, around which FSDP2 gathers the root as around a forward."""
        register_fsdp_forward_method(model, "generate")
        return super().generate(wrapped, model, plan, device)


WRAPPER = FSDP2Wrapper()
