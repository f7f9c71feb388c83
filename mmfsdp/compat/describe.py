"""describe: a model that somebody has wrapped (DDP, FSDP1, FSDP2; by torch, accelerate or us), as a plan.

print(describe(accelerator.prepare(model)))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.nn.parallel import DistributedDataParallel

from ..core.lint import lint, plain_name
from ..core.plan import Param, Unit, WrapPlan
from ..core.trace import Trace, trace_registration
from ..core.units import buffer_bytes, decays, kind_of, unit_name, with_bytes, with_prefetch
from ..params import AutoWrapPolicy, Backend, BackwardPrefetch, FrozenPolicy, FSDPParams, Precision, ShardingStrategy


@dataclass
class WrappedUnit:
    """One call of a wrapper, as the model shows it."""

    modules: tuple[str, ...]
    params: list[Param]
    sharded: bool = True
    reshard_after_forward: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    prefetches: bool = True
    """Its backward may begin the all-gather of the unit before it."""
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


def describe(model: nn.Module) -> WrapPlan:
    """Return the plan of a wrapped model, with the lint's findings. Changes nothing.

    Where backward goes is assumed from the order in which modules were registered, as in a plan without an example;
    a model that mmfsdp wrapped carries its plan. Raises ValueError for a model that is not wrapped.
    """
    while isinstance(model, OptimizedModule) and not isinstance(model, FSDPModule):
        model = model._orig_mod
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    planned: WrapPlan | None = getattr(model, "mmfsdp_plan", None)
    if planned:
        return replace(planned, lint=lint(inner, planned, wrapped=True))
    backend, replicate, shard, wrapped = _read_wrappers(model)
    wrapped += _replicated(inner, wrapped)
    fsdp = _params_of(model, backend, replicate, shard, wrapped)
    units = _plan_units(inner, fsdp, wrapped, replicate, shard)
    if isinstance(model, DistributedDataParallel):
        hooks = {hook for hook, _ in model._comm_hooks}
        if hooks & {bf16_compress_hook, fp16_compress_hook}:  # they send gradients in 16 bits
            units = [replace(unit, reduced_bytes=2 * unit.trainable_numel) for unit in units]
    plan = WrapPlan(
        fsdp=fsdp,
        world_size=replicate * shard,
        replicate=replicate,
        shard=shard,
        units=with_prefetch(units, fsdp),
        buffer_bytes=buffer_bytes(model, fsdp),
        other_collectives=_ddp_collectives(model) if isinstance(model, DistributedDataParallel) else (),
    )
    return replace(plan, lint=lint(inner, plan, wrapped=True))


def _read_wrappers(model: nn.Module) -> tuple[Backend, int, int, list[WrappedUnit]]:
    """Return the backend, the replicate and shard sizes of its mesh, and the units. Raises ValueError."""
    if isinstance(model, DistributedDataParallel):
        params = [_param(name, p, model.module, p.shape) for name, p in model.module.named_parameters()]
        return Backend.DDP, model.process_group.size(), 1, [WrappedUnit(("",), params, sharded=False)]
    fsdp1 = {plain_name(n): m for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}
    if fsdp1:
        first: Any = next(iter(fsdp1.values()))
        units = [_fsdp1_unit(name, module, model) for name, module in fsdp1.items()]
        size = first.process_group.size()
        if first.sharding_strategy is TorchStrategy.NO_SHARD:
            return Backend.FSDP1, size, 1, units
        nodes = getattr(first, "_inter_node_pg", None)
        return Backend.FSDP1, nodes.size() if nodes else 1, size, units
    groups: dict[Any, bool] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[attr-defined]
            for group in param_groups(state):
                groups[group] = bool(state._auto_reshard_after_forward)
    if not groups:
        raise ValueError("model: is not wrapped by DDP, FSDP1 or FSDP2; call make_plan to plan it")
    mesh = next(iter(groups)).mesh_info
    units = [_fsdp2_unit(group, auto, model) for group, auto in groups.items()]
    return Backend.FSDP2, getattr(mesh, "replicate_mesh_size", 1), getattr(mesh, "shard_mesh_size", 1), units


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 state: a list in torch 2.12 and later, one or none before."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _fsdp1_unit(name: str, module: FullyShardedDataParallel, model: nn.Module) -> WrappedUnit:
    def full_name(*parts: str) -> str:
        return plain_name(".".join(part for part in (name, *parts) if part))

    params = []
    if module._handle:
        flat = module._handle.flat_param
        aliases: dict[str, list[str]] = {}
        for info in flat._shared_param_infos:
            first = full_name(info.prim_module_name, info.prim_param_name)
            aliases.setdefault(first, []).append(full_name(info.module_name, info.param_name))
        for i, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
            trainable = flat._params[i].requires_grad if flat._params else flat.requires_grad
            first = full_name(fqn)
            params.append(_param(first, flat, model, shape, trainable, aliases.get(first, [])))
    reshards = module.sharding_strategy in (TorchStrategy.FULL_SHARD, TorchStrategy.HYBRID_SHARD)
    return WrappedUnit(
        (name,),
        params,
        reshard_after_forward=reshards and bool(name),
        reshard_after_backward=reshards,
        prefetches=module.backward_prefetch is not None,
        compute_dtype=module.mixed_precision.param_dtype,
        reduce_dtype=module.mixed_precision.reduce_dtype,
    )


def _fsdp2_unit(group: Any, auto_reshard: bool, model: nn.Module) -> WrappedUnit:
    """Return the unit of a parameter group. auto_reshard: with None for it, FSDP2 does not reshard the root."""
    module_names = {module: plain_name(name) for name, module in model.named_modules()}
    parameter_names = {p: name for name, p in model.named_parameters()}
    params = []
    for fsdp_param in group.fsdp_params:
        p = fsdp_param.sharded_param
        if p in parameter_names:
            params.append(_param(parameter_names[p], p, model, fsdp_param._orig_size))
    modules = tuple(module_names[module] for module in group.modules)
    is_root = modules == ("",)
    precision = group.fsdp_params[0].mp_policy
    return WrappedUnit(
        modules,
        params,
        reshard_after_forward=group._reshard_after_forward and not (auto_reshard and is_root),
        unshard_in_backward=group.unshard_in_backward,
        compute_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
    )


def _param(
    name: str,
    p: torch.Tensor,
    model: nn.Module,
    shape: torch.Size,
    trainable: bool | None = None,
    aliases: Iterable[str] = (),
) -> Param:
    name = plain_name(name)
    trainable = p.requires_grad if trainable is None else trainable
    others = list(aliases)
    if not others:
        others = [plain_name(n) for n, tied in model.named_parameters(remove_duplicate=False) if tied is p]
    return Param(
        name=name,
        shape=tuple(shape),
        dtype=str(p.dtype).removeprefix("torch."),
        trainable=trainable,
        aliases=tuple(other for other in others if other != name and "_flat_param" not in other),
        decays=trainable and decays(model, [name], ndim=len(shape)),
    )


def _replicated(model: nn.Module, wrapped: list[WrappedUnit]) -> list[WrappedUnit]:
    """Return the parameters in no wrapper as one unit that is not sharded."""
    in_units: set[str] = set()
    for unit in wrapped:
        for param in unit.params:
            in_units.update((param.name, *param.aliases))
    params: list[Param] = []
    owners: dict[str, None] = {}
    for name, p in model.named_parameters():
        name = plain_name(name)
        if "_flat_param" not in name and name not in in_units:
            owners[name.rpartition(".")[0]] = None
            params.append(_param(name, p, model, p.shape))
    return [WrappedUnit(tuple(owners), params, sharded=False)] if params else []


def _params_of(
    model: nn.Module, backend: Backend, replicate: int, shard: int, wrapped: list[WrappedUnit]
) -> FSDPParams:
    """Return the parameters that would have led to these units."""
    if backend is Backend.DDP:
        return FSDPParams(backend=backend, auto_wrap_policy=AutoWrapPolicy.NO_WRAP, **_prefetch_params(model))
    hybrid, reshards = replicate > 1, any(unit.reshard_after_forward for unit in wrapped)
    if hybrid:
        strategy = ShardingStrategy.HYBRID_SHARD if reshards else ShardingStrategy.HYBRID_SHARD_ZERO2
    else:
        strategy = ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP
    compute = next((unit.compute_dtype for unit in wrapped if unit.compute_dtype), None)
    reduce = next((unit.reduce_dtype for unit in wrapped if unit.reduce_dtype), None) or compute
    if reduce is None:
        trainable = [param for param in _parameters(wrapped) if param.trainable]
        reduce = getattr(torch, trainable[0].dtype if trainable else "float32")
    flat = any(name.endswith("_flat_param") for name, _ in model.named_parameters())
    return FSDPParams(
        backend=backend,
        sharding_strategy=strategy,
        mixed_precision=_precision(compute) if compute else None,
        reduce_dtype=_precision(reduce),
        auto_wrap_policy=AutoWrapPolicy.NO_WRAP if len(wrapped) == 1 else AutoWrapPolicy.FROZEN_AWARE,
        use_orig_params=False if flat else None,
        dp_replicate=replicate if hybrid else None,
        dp_shard=shard if hybrid else None,
        **_prefetch_params(model),
    )


def _parameters(wrapped: list[WrappedUnit]) -> list[Param]:
    params = []
    for unit in wrapped:
        params += unit.params
    return params


def _precision(dtype: torch.dtype) -> Precision:
    return next(precision for precision in Precision if precision.to_torch() == dtype)


def _prefetch_params(model: nn.Module) -> dict[str, Any]:
    """Return forward_prefetch and backward_prefetch as the wrappers are set."""
    states = []
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            prefetch = module.backward_prefetch
            name = prefetch.name if prefetch else "NO_PREFETCH"
            return {"forward_prefetch": bool(module.forward_prefetch), "backward_prefetch": BackwardPrefetch[name]}
        if isinstance(module, FSDPModule):
            states.append(module._get_fsdp_state())  # type: ignore[attr-defined]
    params: dict[str, Any] = {"forward_prefetch": any(state._states_to_forward_prefetch for state in states)}
    # core.fsdp2 says "no prefetch" by letting each unit prefetch itself.
    unprefetched = [state._states_to_backward_prefetch == [state] for state in states if param_groups(state)]
    if unprefetched and all(unprefetched):
        params["backward_prefetch"] = BackwardPrefetch.NO_PREFETCH
    return params


def _plan_units(
    model: nn.Module, fsdp: FSDPParams, wrapped: list[WrappedUnit], replicate: int, shard: int
) -> list[Unit]:
    """Return the units with their order, policy and bytes."""
    backend = fsdp.effective_backend
    also_trainable: set[str] = set()
    for unit in wrapped:
        if backend is Backend.FSDP1 and kind_of(unit.params) == "mixed":
            # All are views of one flat parameter that trains, the frozen ones, too.
            for param in unit.params:
                also_trainable.update((param.name, *param.aliases))
    trace = trace_registration(model, plain_name=plain_name, also_trainable=also_trainable)
    trainable = [param.name for param in _parameters(wrapped) if param.trainable]
    wrapped = sorted(
        wrapped, key=lambda unit: (not unit.sharded, min(trace.forward_start.get(m, 0) for m in unit.modules))
    )
    ends = sorted(range(len(wrapped)), key=lambda i: max(trace.forward_end.get(m, 0) for m in wrapped[i].modules))
    padded_to = replicate if backend is Backend.FSDP1 and shard == 1 else shard  # NO_SHARD pads as if it sharded
    units = []
    for i, wrapped_unit in enumerate(wrapped):
        planned = with_bytes(_plan_unit(wrapped_unit, i, ends.index(i), trace, trainable), fsdp, padded_to)
        if planned.sharded:
            planned = replace(planned, bytes_at_rest=planned.bytes_at_rest * (padded_to // shard))
        units.append(planned)
    if backend is Backend.FSDP2 and fsdp.backward_prefetch is not BackwardPrefetch.NO_PREFETCH:
        _count_needless_gathers(units, wrapped)
    return units


def _plan_unit(wrapped: WrappedUnit, order: int, forward_end: int, trace: Trace, trainable: list[str]) -> Unit:
    kind = kind_of(wrapped.params)
    # A unit around a trainable parameter returns what requires a gradient.
    prefixes = tuple(f"{m}." if m else "" for m in wrapped.modules)
    has_trainable = any(name.startswith(prefixes) for name in trainable)
    names = [param.name for param in wrapped.params] + [f"{m}._flat_param" for m in wrapped.modules]
    grad_flow = wrapped.unshard_in_backward and (has_trainable or not trace.grad_flow.isdisjoint(names))
    policy = None
    if kind == "frozen" and not wrapped.sharded:
        policy = FrozenPolicy.REPLICATE
    elif kind == "frozen":
        policy = FrozenPolicy.KEEP if grad_flow and not wrapped.reshard_after_forward else FrozenPolicy.SHARD
    gathers = wrapped.sharded and bool(wrapped.params)
    return Unit(
        name=unit_name(wrapped.modules),
        modules=wrapped.modules,
        params=tuple(wrapped.params),
        order=order,
        forward_end=forward_end,
        kind=kind,
        compute_dtype=str(wrapped.compute_dtype).removeprefix("torch.") if wrapped.compute_dtype else "",
        grad_flow=grad_flow,
        frozen_policy=policy,
        sharded=wrapped.sharded,
        reshard_after_forward=wrapped.reshard_after_forward,
        reshard_after_backward=wrapped.reshard_after_backward,
        gathers_forward=int(gathers),
        unshard_in_backward=wrapped.sharded and grad_flow,
        gathers_backward=int(gathers and grad_flow and wrapped.reshard_after_forward),
    )


def _count_needless_gathers(units: list[Unit], wrapped: list[WrappedUnit]) -> None:
    """Add the all-gathers that FSDP2 prefetches for units that backward does not reach, in place."""
    sharded = [i for i, unit in enumerate(units) if unit.sharded and unit.params]
    sharded.sort(key=lambda i: units[i].forward_end)
    for i, after in zip(sharded, sharded[1:], strict=False):
        unreached = not units[i].grad_flow and units[i].reshard_after_forward and wrapped[i].unshard_in_backward
        if unreached and units[after].grad_flow and wrapped[after].prefetches:
            units[i] = replace(units[i], gathers_backward=1)


def _ddp_collectives(model: DistributedDataParallel) -> tuple[tuple[str, str, int], ...]:
    """Return (collective, phase, bytes) of DDP's buffers, and of its exchange on which parameters were used."""
    collectives = []
    buffers = model.modules_buffers if model.broadcast_buffers else []
    if buffers:
        buckets, _ = dist._compute_bucket_assignment_by_size(buffers, [model.broadcast_bucket_size])
        for bucket in buckets:
            collectives.append(("broadcast", "forward", sum(buffers[i].nbytes for i in bucket)))
    if model.find_unused_parameters and not model.static_graph:
        count = sum(p.requires_grad for p in model.module.parameters())
        collectives.append(("all-reduce", "backward", count * torch.int32.itemsize))
    return tuple(collectives)
