"""Read the plan of a model that others have wrapped with DDP or FSDP1; `describe` calls it.

FSDP1's names are private in torch; they were read in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.nn.parallel import DistributedDataParallel

from ...core.names import plain_name
from ...core.plan import Param, Unit, UnitKind, WrapPlan
from ...core.trace import Trace, trace_registration
from ...core.unit_rules import with_bytes
from ...core.units import buffer_bytes, decays, unit_name
from ...params import AutoWrapPolicy, Backend, BackwardPrefetch, FrozenPolicy, FSDPParams, Precision, ShardingStrategy
from ...predict.gathers import with_gathers

FREES_AFTER_FORWARD = (TorchStrategy.FULL_SHARD, TorchStrategy.HYBRID_SHARD)


def read_ddp(model: DistributedDataParallel) -> WrapPlan:
    """Return the plan of a model in DDP: one unit, which is not sharded. Its broadcasts of buffers are not in it."""
    ranks = model.process_group.size()
    params = []
    for name, p in model.module.named_parameters():
        params.append(read_param(plain_name(name, model.module), p, model.module, p.shape))
    fsdp = FSDPParams(backend=Backend.DDP, auto_wrap_policy=AutoWrapPolicy.NO_WRAP)
    trace = trace_registration(model.module)
    unit = with_bytes(_unit(("",), params, trace, sharded=False), fsdp, 1)
    hooks = {hook for hook, _ in model._comm_hooks}
    if hooks & {bf16_compress_hook, fp16_compress_hook}:  # they send gradients in 16 bits
        unit = replace(unit, reduced_bytes=2 * unit.trainable_numel)
    buffers = buffer_bytes(model.module, fsdp)
    return WrapPlan(fsdp=fsdp, world_size=ranks, replicate=ranks, shard=1, units=(unit,), buffer_bytes=buffers)


def read_fsdp1(model: nn.Module, wrappers: Mapping[str, FullyShardedDataParallel]) -> WrapPlan:
    """Return the plan of a model that holds wrappers of FSDP1, by the names of the modules that they wrap."""
    first: Any = next(iter(wrappers.values()))
    replicate, shard = 1, first.process_group.size()
    if first.sharding_strategy is TorchStrategy.NO_SHARD:
        replicate, shard = shard, 1
    elif getattr(first, "_inter_node_pg", None):
        replicate = first._inter_node_pg.size()
    held = {name: _flat_params(name, wrapper, model) for name, wrapper in wrappers.items()}
    # All parameters of a mixed unit are views of one flat parameter that trains, the frozen ones, too.
    also_trainable: set[str] = set()
    for params in held.values():
        if UnitKind.of(p.trainable for p in params) is UnitKind.MIXED:
            for param in params:
                also_trainable.update((param.name, *param.aliases))
    trace = trace_registration(model, also_trainable=also_trainable)
    units = []
    for name, wrapper in wrappers.items():
        unit = _unit((name,), held[name], trace, sharded=True)
        reshards = wrapper.sharding_strategy in FREES_AFTER_FORWARD
        units.append(_with_resharding(unit, reshards and bool(name), reshards, wrapper.mixed_precision.param_dtype))
    units += left_out(model, units, trace)
    units.sort(key=lambda unit: (not unit.sharded, min(trace.forward_start.get(m, 0) for m in unit.modules)))
    ends = sorted(range(len(units)), key=lambda i: max(trace.forward_end.get(m, 0) for m in units[i].modules))
    fsdp = _fsdp1_params(first, units, replicate, shard)
    padded_to = replicate if shard == 1 else shard  # NO_SHARD pads as if it sharded
    for i, unit in enumerate(units):
        unit = with_bytes(replace(unit, order=i, forward_end=ends.index(i)), fsdp, padded_to)
        if unit.sharded:
            unit = replace(unit, bytes_at_rest=unit.bytes_at_rest * (padded_to // shard))
        units[i] = unit
    plan = WrapPlan(
        fsdp=fsdp,
        world_size=replicate * shard,
        replicate=replicate,
        shard=shard,
        units=tuple(units),
        buffer_bytes=buffer_bytes(model, fsdp),
    )
    return with_gathers(plan)


def _flat_params(name: str, wrapper: Any, model: nn.Module) -> list[Param]:
    """Return the parameters that a wrapper's flat parameter is made of."""
    if not wrapper._handle:
        return []

    def full_name(*parts: str) -> str:
        return plain_name(".".join(part for part in (name, *parts) if part), wrapper)

    flat = wrapper._handle.flat_param
    aliases: dict[str, list[str]] = {}
    for info in flat._shared_param_infos:
        first = full_name(info.prim_module_name, info.prim_param_name)
        aliases.setdefault(first, []).append(full_name(info.module_name, info.param_name))
    params = []
    for i, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
        # Without use_orig_params the flat one alone says what trains.
        trainable = flat._params[i].requires_grad if flat._params else flat.requires_grad
        first = full_name(fqn)
        params.append(read_param(first, flat, model, shape, trainable=trainable, aliases=aliases.get(first, [])))
    return params


def left_out(model: nn.Module, units: list[Unit], trace: Trace) -> list[Unit]:
    """Return the parameters in no wrapper as one unit that is not sharded; none if there are none."""
    in_units: set[str] = set()
    for unit in units:
        for param in unit.params:
            in_units.update((param.name, *param.aliases))
    params: list[Param] = []
    owners: dict[str, None] = {}
    for name, p in model.named_parameters():
        name = plain_name(name, model)
        if "_flat_param" not in name and name not in in_units:
            owners[name.rpartition(".")[0]] = None
            params.append(read_param(name, p, model, p.shape))
    return [_unit(tuple(owners), params, trace, sharded=False)] if params else []


def _unit(modules: tuple[str, ...], params: list[Param], trace: Trace, *, sharded: bool) -> Unit:
    """Return a unit of these parameters. Its place and its bytes are found later."""
    kind = UnitKind.of(p.trainable for p in params)
    names = [param.name for param in params] + [f"{module}._flat_param" for module in modules]
    trains = any(param.trainable for param in params)
    policy = None
    if kind is UnitKind.FROZEN:
        policy = FrozenPolicy.SHARD if sharded else FrozenPolicy.REPLICATE
    return Unit(
        name=unit_name(modules),
        modules=modules,
        params=tuple(params),
        order=0,
        forward_end=0,
        kind=kind,
        compute_dtype="",
        grad_flow=trains or not trace.grad_flow.isdisjoint(names),
        frozen_policy=policy,
        sharded=sharded,
    )


def _with_resharding(unit: Unit, after_forward: bool, after_backward: bool, dtype: torch.dtype | None) -> Unit:
    """Return the unit with what FSDP1 does to it: when it is freed, and in which dtype it computes."""
    policy = unit.frozen_policy
    if policy and unit.grad_flow and not after_forward:
        policy = FrozenPolicy.KEEP
    return replace(
        unit,
        frozen_policy=policy,
        compute_dtype=str(dtype).removeprefix("torch.") if dtype else "",
        reshard_after_forward=after_forward,
        reshard_after_backward=after_backward,
    )


def _fsdp1_params(first: Any, units: list[Unit], replicate: int, shard: int) -> FSDPParams:
    """Return the parameters that would have led to these units."""
    hybrid, reshards = replicate > 1, any(unit.reshard_after_forward for unit in units)
    if hybrid:
        strategy = ShardingStrategy.HYBRID_SHARD if reshards else ShardingStrategy.HYBRID_SHARD_ZERO2
    else:
        strategy = ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP
    compute = first.mixed_precision.param_dtype
    reduce = first.mixed_precision.reduce_dtype or compute
    if reduce is None:
        trainable = [param.dtype for unit in units for param in unit.params if param.trainable]
        reduce = getattr(torch, trainable[0] if trainable else "float32")
    prefetch = first.backward_prefetch.name if first.backward_prefetch else "NO_PREFETCH"
    return FSDPParams(
        backend=Backend.FSDP1,
        sharding_strategy=strategy,
        mixed_precision=precision_of(compute) if compute else None,
        reduce_dtype=precision_of(reduce),
        auto_wrap_policy=AutoWrapPolicy.NO_WRAP if len(units) == 1 else AutoWrapPolicy.FROZEN_AWARE,
        use_orig_params=None if first._use_orig_params else False,
        forward_prefetch=bool(first.forward_prefetch),
        backward_prefetch=BackwardPrefetch[prefetch],
        dp_replicate=replicate if hybrid else None,
        dp_shard=shard if hybrid else None,
    )


def read_param(
    name: str,
    p: torch.Tensor,
    model: nn.Module,
    shape: torch.Size,
    *,
    trainable: bool | None = None,
    aliases: Iterable[str] = (),
) -> Param:
    """Return a parameter of a wrapped model.

    name: its plain name. p: the tensor that holds it, which may hold others, too.
    """
    trains = p.requires_grad if trainable is None else trainable
    others = list(aliases)
    if not others:
        named = model.named_parameters(remove_duplicate=False)
        others = [plain_name(other, model) for other, tied in named if tied is p]
    return Param(
        name=name,
        shape=tuple(shape),
        dtype=str(p.dtype).removeprefix("torch."),
        trainable=trains,
        aliases=tuple(other for other in others if other != name and "_flat_param" not in other),
        decays=trains and decays(model, [name], ndim=len(shape)),
    )


def precision_of(dtype: torch.dtype) -> Precision:
    """Return our name of a dtype of torch."""
    return next(precision for precision in Precision if precision.to_torch() == dtype)
