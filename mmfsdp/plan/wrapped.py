"""A model that somebody has wrapped (DDP, FSDP1, FSDP2; by torch, accelerate or us) read back into a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import ShardingStrategy as Torch
from torch.nn.parallel import DistributedDataParallel

from ..params import AutoWrapPolicy, Backend, BackwardPrefetch, FrozenPolicy, FSDPParams, Precision, ShardingStrategy
from ..params.train import decays
from .build import buffer_bytes, kind_of, unit_name, with_bytes, with_prefetch
from .lint import lint, plain_name
from .trace import Trace, registration
from .units import Param, Unit, WrapPlan


@dataclass
class _Found:
    """One call of a wrapper, as it stands in the model."""

    modules: tuple[str, ...]
    params: list[Param]
    reshard: bool = False
    gathers_backward: bool = True
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    sharded: bool = True
    hold: bool = False
    ahead: bool = True
    """Its backward may begin the gather of the unit before it."""


def read_back(model: nn.Module) -> WrapPlan:
    """What a wrapped model's units are, what they hold and send, and what the lint says of them. Changes nothing.

    Where backward goes is assumed from the order in which modules were registered, as in a plan without an example; a
    model that `apply_plan` wrapped carries a plan that knows. Raises ValueError for a model that nobody has wrapped.
    """
    while isinstance(model, OptimizedModule) and not isinstance(model, FSDPModule):  # compiled around it all
        model = model._orig_mod
    backend, mesh, found = _read(model)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    # In a mixed unit of FSDP1 all are views of one flat parameter that trains, the frozen ones, too.
    mixed = [f.params for f in found if backend is Backend.FSDP1 and kind_of(f.params) == "mixed"]
    seen = registration(inner, plain_name, {name for ps in mixed for p in ps for name in (p.name, *p.aliases)})
    ours: WrapPlan | None = getattr(model, "mmfsdp_plan", None)
    told = {frozenset(u.modules): u for u in ours.units} if ours else {}
    apart = {p.name: i for i, u in enumerate(told.values()) for p in u.params}
    left = _left_out(inner, found)
    for one in sorted({apart.get(p.name, -1) for p in left}):
        held = [p for p in left if apart.get(p.name, -1) == one]
        names = ours.units[one].modules if ours and one >= 0 else (p.name.rpartition(".")[0] for p in held)
        found.append(_Found(tuple(dict.fromkeys(names)), held, sharded=False))
    fsdp = ours.fsdp if ours else replace(_params(backend, mesh, found, flat=_is_flat(model)), **_prefetch(model))
    found.sort(key=lambda f: (not f.sharded, min(seen.enter.get(m, 0) for m in f.modules)))
    ends = sorted(range(len(found)), key=lambda i: max(seen.leave.get(m, 0) for m in found[i].modules))
    pads = mesh[0] if backend is Backend.FSDP1 and mesh[1] == 1 else mesh[1]  # NO_SHARD pads as if it sharded
    trained = [p.name for f in found for p in f.params if p.trainable]
    units = [with_bytes(_unit(f, i, ends.index(i), seen, trained), fsdp, pads) for i, f in enumerate(found)]
    units = [replace(u, held_bytes=u.held_bytes * (pads // mesh[1])) if u.sharded else u for u in units]
    if backend is Backend.FSDP2:  # FSDP1 knows what gave no gradient a place to come to
        units = _gathered_in_vain(units, found, fsdp)
    units = sorted((_as_told(u, told.get(frozenset(u.modules))) for u in units), key=lambda u: u.order)
    plan = WrapPlan(
        fsdp=fsdp, world_size=mesh[0] * mesh[1], replicate=mesh[0], shard=mesh[1], units=with_prefetch(units, fsdp)
    )
    plan = replace(plan, lint=lint(model, plan, wrapped=True), buffer_bytes=buffer_bytes(model, fsdp))
    return _as_ddp_sends(model, plan) if isinstance(model, DistributedDataParallel) else plan


def _as_ddp_sends(model: DistributedDataParallel, plan: WrapPlan) -> WrapPlan:
    """With what DDP sends beside gradients, and these in 16 bits where a hook of torch's compresses them."""
    if {bf16_compress_hook, fp16_compress_hook} & {hook for hook, _ in model._comm_hooks}:
        plan = replace(plan, units=tuple(replace(u, reduced_bytes=2 * u.trainable_numel) for u in plan.units))
    return replace(plan, beside=_beside(model))


def _beside(model: DistributedDataParallel) -> tuple[tuple[str, str, int], ...]:
    """Buffers before a step's first forward, and who found which parameter used."""
    buffers = model.modules_buffers if model.broadcast_buffers else []
    parcels, _ = dist._compute_bucket_assignment_by_size(buffers, [model.broadcast_bucket_size]) if buffers else ([], 0)
    found = [("broadcast", "forward", sum(buffers[i].nbytes for i in parcel)) for parcel in parcels]
    if model.find_unused_parameters and not model.static_graph:
        used = torch.empty(sum(p.requires_grad for p in model.module.parameters()), dtype=torch.int32, device="meta")
        found.append(("all-reduce", "backward", used.nbytes))
    return tuple(found)


def _as_told(unit: Unit, told: Unit | None) -> Unit:
    """With what no wrapped model shows, from the plan by which it was wrapped, where that still holds."""
    same = "sharded", "reshard_after_forward", "kind"
    if not told or any(getattr(unit, field) != getattr(told, field) for field in same):
        return unit
    fields = ["name", "modules", "order", "ends", "grad_flow", "frozen_policy", "gathers_forward", "gathers_backward"]
    fields += ["reduced_bytes", "reduced_twice"] + ["compute_dtype"] * (not unit.sharded)
    idle = {p.name for p in told.params if p.idle}
    unit = replace(unit, params=tuple(replace(p, idle=p.name in idle) for p in unit.params))
    return replace(unit, **{field: getattr(told, field) for field in fields})


def _read(model: nn.Module) -> tuple[Backend, tuple[int, int], list[_Found]]:
    """(wrapper, (replicate, shard), units)."""
    if isinstance(model, DistributedDataParallel):
        params = [_param(n, p, model.module, p.shape) for n, p in model.module.named_parameters()]
        return Backend.DDP, (model.process_group.size(), 1), [_Found(("",), params, sharded=False)]
    wrapped = [(plain_name(n), m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    if wrapped:
        first = wrapped[0][1]
        inter, size = getattr(first, "_inter_node_pg", None), first.process_group.size()  # type: ignore[union-attr]
        mesh = (size, 1) if first.sharding_strategy is Torch.NO_SHARD else (inter.size() if inter else 1, size)
        return Backend.FSDP1, mesh, [_flat(name, m, model) for name, m in wrapped]
    groups: dict[int, tuple[Any, bool]] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[attr-defined]
            groups |= {id(g): (g, bool(state._auto_reshard_after_forward)) for g in param_groups(state)}
    if not groups:
        raise ValueError("model: is not wrapped by DDP, FSDP1 or FSDP2; call make_plan to plan it")
    info = next(iter(groups.values()))[0].mesh_info
    mesh = (getattr(info, "replicate_mesh_size", 1), getattr(info, "shard_mesh_size", 1))
    names = {id(m): plain_name(n) for n, m in model.named_modules()}
    named = {id(p): plain_name(n) for n, p in model.named_parameters()}
    return Backend.FSDP2, mesh, [_group(g, auto, names, named, model) for g, auto in groups.values()]


def _gathered_in_vain(units: list[Unit], found: list[_Found], fsdp: FSDPParams) -> list[Unit]:
    """With the gathers that FSDP, left to itself, makes ahead of a backward that ends before it comes there."""
    if fsdp.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
        return units
    moved = sorted((i for i, u in enumerate(units) if u.sharded and u.params), key=lambda i: units[i].ends)
    for i, after in zip(moved, moved[1:], strict=False):
        idle = not units[i].grad_flow and units[i].reshard_after_forward and found[i].gathers_backward
        if idle and units[after].grad_flow and found[after].ahead:
            units[i] = replace(units[i], gathers_backward=1)
    return units


def _prefetch(model: nn.Module) -> dict[str, Any]:
    """What the wrappers were told of gathering ahead."""
    for m in model.modules():
        if isinstance(m, FullyShardedDataParallel):
            told = BackwardPrefetch[m.backward_prefetch.name] if m.backward_prefetch else BackwardPrefetch.NO_PREFETCH
            return {"forward_prefetch": bool(m.forward_prefetch), "backward_prefetch": told}
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]
    idle = [s._states_to_backward_prefetch == [s] for s in states if param_groups(s)]  # as wrap.fsdp2 says it
    return {"forward_prefetch": any(s._states_to_forward_prefetch for s in states)} | (
        {"backward_prefetch": BackwardPrefetch.NO_PREFETCH} if idle and all(idle) else {}
    )


def _is_flat(model: nn.Module) -> bool:
    """FSDP1 without the original parameters."""
    return any(n.endswith("_flat_param") for n, _ in model.named_parameters())


def _flat(name: str, module: FullyShardedDataParallel, model: nn.Module) -> _Found:
    """One FSDP1 unit."""
    handle, params = module._handle, []
    if handle:
        flat = handle.flat_param
        trains = [p.requires_grad for p in flat._params] if flat._params else [flat.requires_grad] * len(flat._fqns)
        aliases: dict[str, list[str]] = {}
        for info in flat._shared_param_infos:
            first = _join(name, f"{info.prim_module_name}.{info.prim_param_name}")
            aliases.setdefault(first, []).append(_join(name, f"{info.module_name}.{info.param_name}"))
        for fqn, shape, train in zip(flat._fqns, flat._shapes, trains, strict=True):
            first = _join(name, fqn)
            params.append(_param(first, flat, model, shape, train, tuple(aliases.get(first, ()))))
    reshard = module.sharding_strategy in (Torch.FULL_SHARD, Torch.HYBRID_SHARD)
    mp = module.mixed_precision
    return _Found(
        (name,),
        params,
        reshard and bool(name),
        True,
        mp.param_dtype,
        mp.reduce_dtype,
        hold=not reshard,
        ahead=module.backward_prefetch is not None,
    )


def _join(module: str, name: str) -> str:
    return plain_name(f"{module}.{name}" if module else name)


def _group(group: Any, auto: bool, names: dict[int, str], named: dict[int, str], model: nn.Module) -> _Found:
    """One FSDP2 unit."""
    params = [
        _param(named[id(p.sharded_param)], p.sharded_param, model, p._orig_size)
        for p in group.fsdp_params
        if id(p.sharded_param) in named
    ]
    modules = tuple(names[id(m)] for m in group.modules)
    unit = getattr(group.modules[0], "mmfsdp_unit", None)
    mp = group.fsdp_params[0].mp_policy
    return _Found(
        modules,
        params,
        group._reshard_after_forward and not (auto and modules == ("",)),
        group.unshard_in_backward,
        mp.param_dtype,
        mp.reduce_dtype,
        hold=bool(unit and unit.hold),
    )


def _param(
    name: str,
    p: torch.Tensor,
    model: nn.Module,
    shape: torch.Size,
    trainable: bool | None = None,
    aliases: tuple[str, ...] = (),
) -> Param:
    name = plain_name(name)
    trainable = p.requires_grad if trainable is None else trainable
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    every = aliases or tuple(
        n for n, q in ((plain_name(n), q) for n, q in model.named_parameters(remove_duplicate=False)) if q is p
    )
    return Param(
        name=name,
        shape=tuple(shape),
        dtype=str(p.dtype).removeprefix("torch."),
        trainable=trainable,
        aliases=tuple(n for n in every if n != name and "_flat_param" not in n),
        decays=trainable and decays(name, ndim=len(shape), owner=owner),
    )


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 state: a list in newer torch, one or none before."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _left_out(model: nn.Module, found: list[_Found]) -> list[Param]:
    """Parameters in no unit: every rank holds them whole."""
    held = {name for f in found for p in f.params for name in (p.name, *p.aliases)}
    named = [(plain_name(n), p) for n, p in model.named_parameters() if "_flat_param" not in n]
    return [_param(n, p, model, p.shape) for n, p in named if n not in held]


def _params(backend: Backend, mesh: tuple[int, int], found: list[_Found], *, flat: bool) -> FSDPParams:
    """The choices that would have led here."""
    if backend is Backend.DDP:
        return FSDPParams(backend=backend, auto_wrap_policy=AutoWrapPolicy.NO_WRAP)
    hybrid, reshards = mesh[0] > 1, any(f.reshard for f in found)
    strategy = {
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy.HYBRID_SHARD_ZERO2,
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
    }[hybrid, reshards]
    compute = next((f.compute for f in found if f.compute), None)
    own = next((p.dtype for f in found for p in f.params if p.trainable), "float32")
    reduce = next((f.reduce for f in found if f.reduce), None) or compute or getattr(torch, own)
    return FSDPParams(
        backend=backend,
        sharding_strategy=strategy,
        mixed_precision=_precision(compute) if compute else None,
        reduce_dtype=_precision(reduce),
        auto_wrap_policy=AutoWrapPolicy.NO_WRAP if len(found) == 1 else AutoWrapPolicy.FROZEN_AWARE,
        use_orig_params=False if flat else None,
        dp_replicate=mesh[0] if hybrid else None,
        dp_shard=mesh[1] if hybrid else None,
    )


def _precision(dtype: torch.dtype) -> Precision:
    return next(p for p in Precision if p.to_torch() == dtype)


def _unit(found: _Found, order: int, ends: int, seen: Trace, trained: list[str]) -> Unit:
    """trained: names of all that trains; a unit around some of it gives what requires a gradient."""
    kind = kind_of(found.params)
    names = [p.name for p in found.params] + [f"{m}._flat_param" for m in found.modules]
    inside = any(not m or n.startswith(f"{m}.") for m in found.modules for n in trained)
    flow = found.gathers_backward and (inside or any(n in seen.flow for n in names))
    policy = None
    if kind == "frozen":
        kept = flow and not found.reshard
        policy = FrozenPolicy.KEEP if kept else FrozenPolicy.SHARD
        policy = policy if found.sharded else FrozenPolicy.REPLICATE
    moves = found.sharded and bool(found.params)
    return Unit(
        name=unit_name(found.modules),
        modules=found.modules,
        params=tuple(found.params),
        order=order,
        ends=ends,
        kind=kind,
        compute_dtype=str(found.compute).removeprefix("torch.") if found.compute else "",
        grad_flow=flow,
        frozen_policy=policy,
        sharded=found.sharded,
        reshard_after_forward=found.reshard,
        hold=found.hold,
        gathers_forward=int(moves),
        gathers_backward=int(moves and flow and found.reshard),
    )
