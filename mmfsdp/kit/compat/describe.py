"""describe: a model that somebody has wrapped with DDP, FSDP1 or FSDP2 (by torch, accelerate or us), as a plan.

print(describe(accelerator.prepare(model)))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ...core.model_record import plan_of
from ...core.names import plain_name
from ...core.plan import Unit, UnitKind, WrapPlan
from ...core.trace import Trace, trace_registration
from ...core.unit_rules import with_bytes
from ...core.units import buffer_bytes, torch_dtype, unit_name
from ...lint.cost import lint_cost
from ...lint.plan import lint
from ...params import FrozenPolicy, FSDPParams, ShardingStrategy
from ...predict.gathers import with_gathers
from .describe_flat import left_out, precision_of, read_ddp, read_fsdp1, read_param
from .describe_lint import lint_switches


def describe(model: nn.Module) -> WrapPlan:
    """Return the plan of a model that was wrapped with DDP, FSDP1 or FSDP2, with the lint's findings. Changes nothing.

    A model that mmfsdp wrapped carries its plan. For others, the units that backward passes through are assumed from
    the order in which modules were registered, as in a plan without an example, and backward is assumed to prefetch as
    FSDP2 does by default.

    Args:
        model: The wrapped model, by torch, accelerate or mmfsdp; it may be compiled.

    Returns:
        The plan, as `make_plan` returns one.

    Raises:
        ValueError: If the model is not wrapped, or with FSDP2 only in part.
    """
    while isinstance(model, OptimizedModule) and not isinstance(model, FSDPModule):
        model = model._orig_mod
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    fsdp1 = {plain_name(n, model): m for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
    plan = plan_of(model)
    if plan is None and isinstance(model, DistributedDataParallel):
        plan = read_ddp(model)
    elif plan is None and fsdp1:
        plan = read_fsdp1(model, fsdp1)
    elif plan is None:
        plan = _read_fsdp2(model)
    findings = (*lint(inner, plan, wrapped=True), *lint_switches(inner, plan), *lint_cost(inner, plan))
    return replace(plan, lint=findings)


def _read_fsdp2(model: nn.Module) -> WrapPlan:
    """Return the plan of a model by the parameter groups that `fully_shard` has made of it."""
    groups: dict[Any, bool] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[attr-defined]
            for group in param_groups(state):
                groups[group] = bool(state._auto_reshard_after_forward)
    if not groups:
        raise ValueError("model: is not wrapped by DDP, FSDP1 or FSDP2; call make_plan to plan it")
    trace = trace_registration(model)
    units = [_unit(group, auto, model, trace) for group, auto in groups.items()]
    never_gathered = {unit.modules for unit, group in zip(units, groups, strict=True) if not group.unshard_in_backward}
    units.sort(key=lambda unit: min(trace.forward_start.get(name, 0) for name in unit.modules))
    in_units: set[str] = set()
    for unit in units:
        in_units.update(param.name for param in unit.params)
    for name, p in model.named_parameters():
        # fully_shard leaves out its ignored_params, such as replicated frozen weights. It reduces none of them.
        if plain_name(name, model) not in in_units and (p.requires_grad or not isinstance(model, FSDPModule)):
            raise ValueError(f"{plain_name(name, model)}: is in no unit; call fully_shard on the whole model, last")
    units += left_out(model, units, trace)
    mesh = next(iter(groups)).mesh_info
    replicate, shard = getattr(mesh, "replicate_mesh_size", 1), getattr(mesh, "shard_mesh_size", 1)
    fsdp = _params_of(list(groups), units, replicate, shard)
    ends = sorted(range(len(units)), key=lambda i: max(trace.forward_end.get(name, 0) for name in units[i].modules))
    for i, unit in enumerate(units):
        units[i] = with_bytes(replace(unit, order=i, forward_end=ends.index(i)), fsdp, shard)
    plan = WrapPlan(
        fsdp=fsdp,
        world_size=replicate * shard,
        replicate=replicate,
        shard=shard,
        units=tuple(units),
        buffer_bytes=buffer_bytes(model, fsdp),
    )
    return _with_needless_gathers(with_gathers(plan), never_gathered)


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 state: a list in torch 2.12 and later, one or none before."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _unit(group: Any, auto_reshard: bool, model: nn.Module, trace: Trace) -> Unit:
    """Return the unit of a parameter group. auto_reshard: with None for it, FSDP2 does not reshard the root."""
    module_names = {module: plain_name(name, model) for name, module in model.named_modules()}
    parameter_names = {p: plain_name(name, model) for name, p in model.named_parameters()}
    modules = tuple(module_names[module] for module in group.modules)
    params = []
    for fsdp_param in group.fsdp_params:
        p = fsdp_param.sharded_param
        if p in parameter_names:
            params.append(read_param(parameter_names[p], p, model, fsdp_param._orig_size))
    reshards = group._reshard_after_forward and not (auto_reshard and modules == ("",))
    kind = UnitKind.of(p.trainable for p in params)
    dtype = group.fsdp_params[0].mp_policy.param_dtype
    # A unit around a trainable parameter returns what requires a gradient.
    returns_grad = not trace.grad_flow.isdisjoint(param.name for param in params)
    for module in group.modules:
        returns_grad = returns_grad or any(p.requires_grad for p in module.parameters())
    grad_flow = group.unshard_in_backward and returns_grad
    policy = None
    if kind is UnitKind.FROZEN:
        policy = FrozenPolicy.KEEP if grad_flow and not reshards else FrozenPolicy.SHARD
    return Unit(
        name=unit_name(modules),
        modules=modules,
        params=tuple(params),
        order=0,  # the places among the other units are found later
        forward_end=0,
        kind=kind,
        compute_dtype=str(dtype).removeprefix("torch.") if dtype else "",
        grad_flow=grad_flow,
        frozen_policy=policy,
        sharded=True,
        reshard_after_forward=reshards,
        reshard_after_backward=True,
    )


def _params_of(groups: list[Any], units: list[Unit], replicate: int, shard: int) -> FSDPParams:
    """Return the parameters that would have led to these units."""
    reshards = any(unit.reshard_after_forward for unit in units)
    strategy = ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP
    hybrid = replicate > 1
    if hybrid:
        strategy = ShardingStrategy.HYBRID_SHARD if reshards else ShardingStrategy.HYBRID_SHARD_ZERO2
    dtypes = groups[0].fsdp_params[0].mp_policy
    own_dtype = torch.float32
    for unit in units:
        for param in unit.params:
            if param.trainable:
                own_dtype = torch_dtype(param.dtype)
    return FSDPParams(
        sharding_strategy=strategy,
        mixed_precision=precision_of(dtypes.param_dtype) if dtypes.param_dtype else None,
        reduce_dtype=precision_of(dtypes.reduce_dtype or dtypes.param_dtype or own_dtype),
        dp_replicate=replicate if hybrid else None,
        dp_shard=shard if hybrid else None,
    )


def _with_needless_gathers(plan: WrapPlan, never_gathered: set[tuple[str, ...]]) -> WrapPlan:
    """Return the plan with the all-gathers that FSDP2 prefetches for units that backward does not reach.

    never_gathered: modules of the units that somebody told not to be gathered in backward.
    """
    units = list(plan.units)
    sharded = [i for i, unit in enumerate(units) if unit.sharded and unit.params]
    sharded.sort(key=lambda i: units[i].forward_end)
    for i, after in zip(sharded, sharded[1:], strict=False):
        unit = units[i]
        needless = unit.reshard_after_forward and not unit.grad_flow and unit.modules not in never_gathered
        if needless and units[after].grad_flow:
            units[i] = replace(unit, gathers_backward=1)
    return replace(plan, units=tuple(units))
