"""From groups of modules to units: kinds, policies, dtypes, gathers and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import ceil

import torch
from torch import nn

from ..params import Backend, BackwardPrefetch, FrozenPolicy, FSDPParams
from ..params.train import decays
from .cost import ahead_in_forward
from .ties import home
from .trace import Trace
from .units import ITEMSIZE, ROOT, Param, Unit

FSDP1_ALIGNMENT = 16
"""Bytes to which FSDP1 aligns each parameter in its flat one, where it keeps the original ones."""


def build_units(
    model: nn.Module, fsdp: FSDPParams, groups: list[list[str]], whole: set[str], seen: Trace, *, shard: int
) -> tuple[Unit, ...]:
    """Units in the order in which they run, the root's first. `whole`: parameters that must be replicated."""
    params = _params(model, fsdp)
    by_group: dict[int | None, list[Param]] = {i: [] for i in range(len(groups))} | {None: []}
    replicated: list[Param] = []
    for p in params:
        (replicated if p.name in whole else by_group[home(p.name, groups)]).append(p)
    order = sorted(range(len(groups)), key=lambda i: min(seen.enter.get(m, 0) for m in groups[i]))
    modules: list[tuple[tuple[str, ...], list[Param]]] = [(("",), by_group[None])]
    modules += [(tuple(groups[i]), by_group[i]) for i in order if by_group[i]]
    if replicated:
        modules.append((tuple(dict.fromkeys(p.name.rpartition(".")[0] for p in replicated)), replicated))
    tail = _tail(model, [m for m, _ in modules], seen)
    ends = sorted(range(len(modules)), key=lambda i: max(seen.leave.get(name, 0) for name in modules[i][0]))

    def runs(names: tuple[str, ...]) -> int:
        often = [seen.calls[name] for name in names] if seen.calls else [1]
        return max(1, min(often)) if any(often) else 0

    units = [
        _unit(m, ps, fsdp, whole=ps is replicated, flow=_flows(model, m, ps, fsdp, seen), tail=m in tail, runs=runs(m))
        for m, ps in modules
    ]
    return tuple(with_bytes(replace(u, order=i, ends=ends.index(i)), fsdp, shard) for i, u in enumerate(units))


def buffer_bytes(model: nn.Module, fsdp: FSDPParams) -> int:
    """What the model's buffers take on every rank."""
    other = fsdp.buffer_dtype.to_torch().itemsize if fsdp.buffer_dtype else 0
    return sum(b.numel() * (other if other and b.is_floating_point() else b.itemsize) for b in model.buffers())


def _flows(model: nn.Module, modules: tuple[str, ...], params: list[Param], fsdp: FSDPParams, seen: Trace) -> bool:
    """True if backward gathers the unit: for FSDP1, also where only a unit inside it needs that."""
    if fsdp.effective_backend is Backend.FSDP1 and params:
        if any(p.requires_grad for name in modules for p in model.get_submodule(name).parameters()):
            return True
    return any(p.name in seen.flow for p in params)


def _params(model: nn.Module, fsdp: FSDPParams) -> list[Param]:
    """Every parameter once, as it will rest."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    found = []
    for name, p in model.named_parameters():
        at_rest = p.dtype
        if fsdp.frozen_dtype and not p.requires_grad and p.is_floating_point():
            at_rest = fsdp.frozen_dtype.to_torch()
        if fsdp.mixed_precision and p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
            at_rest = torch.float32  # an optimizer's small steps are lost on 16 bits
        found.append(
            Param(
                name=name,
                shape=tuple(p.shape),
                dtype=str(at_rest).removeprefix("torch."),
                trainable=p.requires_grad,
                aliases=tuple(names[id(p)][1:]),
                decays=p.requires_grad and _decays(model, p, names[id(p)]),
            )
        )
    return found


def _decays(model: nn.Module, p: nn.Parameter, names: list[str]) -> bool:
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names]
    return all(decays(name, ndim=p.ndim, owner=owner) for name, owner in zip(names, owners, strict=True))


def _tail(model: nn.Module, modules: list[tuple[str, ...]], seen: Trace) -> set[tuple[str, ...]]:
    """Units that end after the last repeated layer: backward begins with them, so they stay gathered till then."""
    ends = {m: max(seen.leave.get(name, 0) for name in m) for m in modules}
    leaves = [m for m in modules if not any(_inside(other, m) for other in modules if other is not m)]
    last = max(leaves, key=lambda m: ends[m])
    layers = [m for m in leaves if any(_in_list(model, name) for name in m)]
    after = max((ends[m] for m in layers if m != last), default=0)
    return {m for m in modules if ends[m] > after or _inside(last, m) or m == last}


def _in_list(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    return any(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in around)


def _inside(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return any(a != b and (not b or a.startswith(f"{b}.")) for a in inner for b in outer)


def unit_name(modules: tuple[str, ...]) -> str:
    """The module's name, or the names that differ in braces: layers.0.{attn,ff}."""
    if len(modules) == 1:
        return modules[0] or ROOT
    paths = [name.split(".") for name in modules]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    together = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    rest = [".".join(path[len(together) :]) for path in paths]
    return ".".join([*together, "{" + ",".join(rest) + "}"])


_KINDS = {frozenset(): "empty", frozenset([False]): "frozen", frozenset([True]): "trainable"}
_KINDS[frozenset([False, True])] = "mixed"


def kind_of(params: list[Param]) -> str:
    """empty, frozen, trainable or mixed."""
    return _KINDS[frozenset(p.trainable for p in params)]


def _unit(
    modules: tuple[str, ...],
    params: list[Param],
    fsdp: FSDPParams,
    *,
    whole: bool,
    flow: bool,
    tail: bool,
    runs: int,
) -> Unit:
    """runs: how often the unit's forward runs in the model's."""
    kind = kind_of(params)
    ddp = fsdp.effective_backend is Backend.DDP
    policy = None
    if kind == "frozen":
        policy = FrozenPolicy.REPLICATE if ddp or whole else fsdp.frozen_policy
        if policy is FrozenPolicy.REPLICATE and modules == ("",) and not ddp:
            policy = FrozenPolicy.SHARD  # the wrapper of the whole model starts the others: it must be there
    sharded = not ddp and policy is not FrozenPolicy.REPLICATE
    flow = flow or kind in ("trainable", "mixed")
    root = modules == ("",)
    keep = policy is FrozenPolicy.KEEP or (kind != "frozen" and not fsdp.sharding_strategy.reshard_after_forward)
    reshard = sharded and not root and (not flow or not (keep or tail))
    compute = _compute_dtype(params, fsdp)
    if not sharded and not ddp and compute:  # nothing casts them on the way: they rest as they compute
        params = [replace(p, dtype=compute) if _floating(p) else p for p in params]
    moves = int(sharded and bool(params) and runs > 0)
    # FSDP2 frees a unit after each of its backwards, FSDP1 after the last.
    again = runs - (not reshard) if fsdp.effective_backend is Backend.FSDP2 else reshard
    return Unit(
        name=unit_name(modules),
        modules=modules,
        params=tuple(params),
        order=0,
        ends=0,
        kind=kind,
        compute_dtype=compute,
        grad_flow=flow,
        frozen_policy=policy,
        sharded=sharded,
        reshard_after_forward=reshard,
        hold=sharded and (keep if fsdp.effective_backend is Backend.FSDP2 else not reshard),
        gathers_forward=moves * (runs if reshard else 1),
        gathers_backward=moves * flow * again,
    )


def _compute_dtype(params: list[Param], fsdp: FSDPParams) -> str:
    """Mixed precision's; else fp32 where frozen weights rest in something smaller; else each parameter's own."""
    if fsdp.mixed_precision:
        return str(fsdp.mixed_precision.to_torch()).removeprefix("torch.")
    if fsdp.frozen_dtype and any(not p.trainable for p in params):
        return "float32"
    return ""


def with_bytes(unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
    """The unit with the bytes that each rank holds, gathers and reduces."""
    reduce = ITEMSIZE[str(fsdp.reduce_dtype.to_torch()).removeprefix("torch.")]
    if fsdp.effective_backend is Backend.FSDP1 and unit.sharded:
        return _flat_bytes(unit, shard, reduce, orig=fsdp.use_orig_params is not False)
    held = gathered = reduced = 0
    for p in unit.params:
        padded = p.padded(shard) if unit.sharded else p.numel
        held += padded // (shard if unit.sharded else 1) * ITEMSIZE[p.dtype]
        gathered += padded * _compute_size(unit, p)
        if p.trainable and not p.idle:
            reduced += padded * (reduce if unit.sharded else ITEMSIZE[p.dtype])
    return replace(unit, held_bytes=held, gathered_bytes=gathered, reduced_bytes=reduced)


def with_prefetch(units: Sequence[Unit], fsdp: FSDPParams) -> tuple[Unit, ...]:
    """The units with what is gathered ahead of need while each runs: as FSDP1 and FSDP2 do with these choices."""
    names, forward = {u.order: u.name for u in units}, ahead_in_forward(units, fsdp)
    moved = sorted((u for u in units if u.sharded and u.gathers_forward), key=lambda u: u.ends)
    backward = {u.order: before for before, u in zip(moved, moved[1:], strict=False) if u.grad_flow}
    if fsdp.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
        backward = {}
    return tuple(
        replace(
            u,
            ahead_forward=tuple(names[order] for order in forward.get(u.order, ())),
            ahead_backward=b.name if (b := backward.get(u.order)) and b.gathers_backward else "",
        )
        for u in units
    )


def _compute_size(unit: Unit, p: Param) -> int:
    return ITEMSIZE[unit.compute_dtype if unit.compute_dtype and _floating(p) else p.dtype]


def _floating(p: Param) -> bool:
    return p.dtype.startswith(("float", "bfloat"))


def _flat_bytes(unit: Unit, shard: int, reduce: int, *, orig: bool) -> Unit:
    """FSDP1: one flat parameter, aligned inside where the original ones are kept, and padded to the ranks."""
    if not unit.params:
        return unit
    size = max(_compute_size(unit, p) for p in unit.params)
    align = FSDP1_ALIGNMENT // size if orig else 1
    numel = 0
    for p in unit.params:
        numel = ceil(numel / align) * align + p.numel
    numel = ceil(numel / shard) * shard
    at_rest = max(ITEMSIZE[p.dtype] for p in unit.params)
    return replace(
        unit,
        held_bytes=numel // shard * at_rest,
        gathered_bytes=numel * size,
        reduced_bytes=numel * reduce if any(p.trainable and not p.idle for p in unit.params) else 0,
    )


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a plan's name for it."""
    return getattr(torch, name)
