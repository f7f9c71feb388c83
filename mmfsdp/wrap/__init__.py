"""A WrapPlan applied to a model: the only place that calls DDP, FSDP1 and fully_shard."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..params import Backend, FSDPParams
from ..plan import WrapPlan, make_plan
from ..plan.checkpointing import checkpoint_activations
from ..plan.lint import lint
from .batch_norms import widen_batch_norms
from .compiling import compile_units
from .ddp import wrap_ddp
from .fsdp1 import wrap_fsdp1
from .fsdp2 import wrap_fsdp2
from .rest import reshard
from .start import Source, cast_at_rest, copy_from_rank0, weights_of

__all__ = ["apply_plan", "plan_of", "reshard", "wrap_fsdp"]

_WRAP = {Backend.DDP: wrap_ddp, Backend.FSDP1: wrap_fsdp1, Backend.FSDP2: wrap_fsdp2}


def wrap_fsdp(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    example: dict[str, Any] | None = None,
) -> nn.Module:
    """Plan and apply: returns the wrapped model. Every rank must call it, after its process group is there.

    See `make_plan` for `example` and `apply_plan` for the rest. What the lint warns of, rank 0 warns of.
    """
    params = params or FSDPParams()
    plan = make_plan(model, params, world_size=dist.get_world_size(), example=example)
    for finding in plan.lint if dist.get_rank() == 0 and not plan.refused else ():
        warnings.warn(f"plan: {finding.message}", stacklevel=2)
    return apply_plan(model, plan, device=device, mesh=mesh)


def apply_plan(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    weights: Source | None = None,
) -> nn.Module:
    """Wrap a model as planned and start every rank from rank 0's weights.

    model: on the CPU or on `device`; ranks other than 0 may have it on the meta device instead, and no rank then
    holds more than its shard and one parameter at a time. FSDP2 wraps in place; DDP and FSDP1 return a wrapper.
    weights: what hands out rank 0's, where it has the model on the meta device, too (of `open_model`, or a dict).
    device: this rank's; default its current GPU with nccl, else the CPU. mesh: default made from the plan.
    Raises ValueError if the plan's lint found errors or if it was made for another number of ranks.
    """
    replace(plan, lint=plan.lint + lint(model, plan)).check()  # the model or the plan may have been changed since
    device = torch.device(device) if device is not None else _default_device()
    mesh = mesh or make_mesh(plan, device)
    if mesh.size() != plan.world_size:
        raise ValueError(f"mesh: has {mesh.size()} ranks but the plan was made for world_size {plan.world_size}")
    weights = weights_of(model, device, weights)
    if weights is None and plan.fsdp.sync_module_states:
        copy_from_rank0(model, device)
    cast_at_rest(model, plan)
    widen_batch_norms(model, plan)
    compile_units(model, plan)
    checkpoint_activations(model, plan)
    wrapped = _WRAP[plan.backend](model, plan, device=device, mesh=mesh, weights=weights)
    wrapped.mmfsdp_plan = plan  # type: ignore[assignment]
    return wrapped


def plan_of(model: nn.Module) -> WrapPlan | None:
    """The plan that a model was wrapped by, if it was."""
    return getattr(model, "mmfsdp_plan", None)


def make_mesh(plan: WrapPlan, device: torch.device) -> DeviceMesh:
    """(dp_shard) or (dp_replicate, dp_shard). Without dp_shard given, a hybrid mesh shards within a node."""
    if plan.replicate == 1 or plan.backend is Backend.DDP:
        return init_device_mesh(device.type, (plan.world_size,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device.type, (plan.replicate, plan.shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def _default_device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
