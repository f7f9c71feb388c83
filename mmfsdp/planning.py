"""The door: `make_plan` plans how a model will be wrapped, straight down; `wrap_fsdp` plans, and applies the plan."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .core.collectives import answering_ranks, from_rank_0, rank
from .core.names import model_digest
from .core.optimizer_states import gathered_bytes, kept_states
from .core.plan import WrapPlan
from .core.planner import mesh_shape, plan_units
from .core.quantize import quantized_copy
from .core.wrap import apply_plan
from .lint.cost import lint_cost
from .lint.plan import lint
from .params import Device, FrozenPolicy, FSDPParams, ParamError, TrainParams
from .params.fsdp import LEAST_RECOMPUTATION
from .predict.auto import choose_policies, with_least_recomputation
from .predict.gathers import with_gathers
from .predict.larger_units import with_example, without_example
from .predict.plan_cache import PlanCache


def make_plan(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    world_size: int,
    example: dict[str, Any] | None = None,
    train: TrainParams | None = None,
    cache: PlanCache | None = None,
) -> WrapPlan:
    """Plan how a model will be wrapped. Needs no process group and no weights.

    With an example, the order of the units and the modules that backward passes through are traced. All-gathers of
    modules that run several times, or again for activation checkpointing, are counted. Without one, modules are assumed
    to run in the order in which they were registered.

    Args:
        model: The plain model with its frozen parameters. It may be on the meta device, and is not changed.
        params: How to group, shard and gather. Default: `FSDPParams()`.
        world_size: Number of ranks.
        example: Keyword arguments of one forward. Meta tensors are enough, except where forward reads values, such as
            masks and grids of patches. The frozen policy AUTO needs it. Include labels if the model computes the loss:
            without a loss, backward begins at the sum of all outputs, and the plan says so (`without_loss`).
        train: The step that AUTO predicts, the optimizer, and the device that the lint considers. Default:
            `TrainParams()`.
        cache: A `PlanCache` of predict/plan_cache.py. Give the same one to each call with a model that does not
            change, and another policy or number of ranks is planned without running it again.

    Returns:
        The plan: units with their bytes and all-gathers, and the findings of the lint in `lint`. Print it for a table.

    Raises:
        ParamError: If this model or number of ranks does not allow one of `params`.
        ValueError: If the model does not take the example.
    """
    params, train, cache = params or FSDPParams(), train or TrainParams(), cache or PlanCache()
    # These raise before the model is traced, which takes longest.
    mesh_shape(params, world_size)
    if params.frozen_policy is FrozenPolicy.AUTO and example is None:
        raise ParamError("frozen_policy", "AUTO needs an example to count activations; pass example= to make_plan")
    if params.activation_checkpointing == LEAST_RECOMPUTATION:
        make = partial(make_plan, model, world_size=world_size, example=example, train=train, cache=cache)
        return with_least_recomputation(make, params)
    model = quantized_copy(model, params)
    # Groups depend on what is frozen and on the order of modules, not on the policy or the dtypes.
    grouped = cache.group(model, params, example)
    if params.frozen_policy is FrozenPolicy.AUTO and example is not None:
        plan = choose_policies(model, params, grouped, world_size, example, train, cache)
    else:
        plan = with_gathers(plan_units(model, params, params.frozen_policy, grouped, world_size))
        plan = replace(plan, optimizer_states=kept_states(train))
    plan = replace(plan, optimizer_gathers=gathered_bytes(train.optimizer))
    on_gpu = train.device is Device.CUDA or (train.device is Device.AUTO and torch.cuda.is_available())
    findings = lint(model, plan, trace=grouped.trace)
    plan = replace(plan, lint=(*findings, *lint_cost(model, plan, on_gpu=on_gpu)))
    if example is None or plan.refused:
        return without_example(plan)
    return with_example(model, plan, example, cache, train)


def wrap_fsdp(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    example: dict[str, Any] | None = None,
) -> nn.Module:
    """Plan, wrap and return the model. Every rank must call it, once the process group exists.

    Args:
        model: The plain model with its frozen parameters, on the CPU or on `device`. Ranks other than 0 may have it on
            the meta device: every rank starts from rank 0's weights.
        params: How to group, shard and gather. Default: `FSDPParams()`. A HYBRID strategy without sizes takes them from
            a mesh of two axes, or else makes one replica per node, with LOCAL_WORLD_SIZE ranks (torchrun sets it).
        device: The device of this rank. Default: its current GPU with nccl, else the CPU.
        mesh: A device mesh of one axis, or of two: replicas, then shards. Default: a mesh over all ranks.
        example: Keyword arguments of one forward; see `make_plan`. That of rank 0 counts: it plans for all ranks.

    Returns:
        The wrapped model. FSDP2 wraps in place; DDP and FSDP1 return a wrapper. Make the optimizer after this call.

    Raises:
        ValueError: If the lint finds errors, or if the mesh has another number of ranks. A ParamError for a choice that
            this model or number of ranks does not allow.

    Warns:
        On rank 0, with each warning of the lint.
    """
    params = params or FSDPParams()
    if mesh is not None and mesh.ndim == 2:
        params = params.with_node_size(mesh.size(1))
    elif "LOCAL_WORLD_SIZE" in os.environ:
        params = params.with_node_size(int(os.environ["LOCAL_WORLD_SIZE"]))
    plan = plan_on_rank_0(model, partial(make_plan, model, params, world_size=dist.get_world_size(), example=example))
    if rank() == 0 and not plan.refused:
        for finding in plan.lint:
            if finding.level == "warning":
                warnings.warn(f"plan: {finding.message}", stacklevel=2)
    return apply_plan(model, plan, device=device, mesh=mesh)


def plan_on_rank_0(model: nn.Module, make: Callable[[], WrapPlan]) -> WrapPlan:
    """Return the plan that rank 0 makes: all ranks have the same one. Every rank must call it.

    To plan takes seconds of CPU time, and ranks share their node's cores. A rank whose model is not rank 0's makes its
    plan by itself, and so do all where rank 0 fails: each then raises the error.
    """
    if answering_ranks() == 1:
        return make()
    if rank() == 0:
        try:
            plan = make()
        except Exception:
            from_rank_0(None)
            raise
        from_rank_0([model_digest(model), plan.to_dict()])
        return plan
    handed = from_rank_0(None)
    if handed and handed[0] == model_digest(model):
        return WrapPlan.from_dict(handed[1])
    return make()
