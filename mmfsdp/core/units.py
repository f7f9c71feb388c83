"""Make units of groups: their kind, policy, dtypes, bytes, and when they are freed.

Their all-gathers are counted by `with_gathers` of predict/gathers.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..params import FrozenPolicy, FSDPParams, ParamError
from .group import common_module, contains, owning_group
from .names import ancestors, named_tensors
from .plan import ITEMSIZE, ROOT, Param, Unit, UnitKind
from .quantize import count_weights, matrix_name
from .recompute import recomputed_modules
from .trace import Trace
from .unit_rules import with_bytes

EMBEDDING_ENDINGS = ("latents", "embs", "embed", "embedding", "embeddings", "token", "query", "queries")
"""Endings of the names of learned embeddings and queries: weight decay is not for them."""

Modules = tuple[str, ...]


def build_units(
    model: nn.Module,
    fsdp: FSDPParams,
    policy: FrozenPolicy,
    groups: list[list[str]],
    replicated: set[str],
    trace: Trace,
    *,
    shard: int,
) -> tuple[Unit, ...]:
    """Make the units of a model.

    Args:
        model: The plain model.
        fsdp: How to shard and gather.
        policy: The policy of the frozen units; not AUTO.
        groups: Lists of module names: each becomes a unit if a parameter is left for it.
        replicated: Names of parameters of which every rank must hold all.
        trace: The order of the modules, and the path of backward.
        shard: Ranks along the shard axis of the mesh.

    Returns:
        The units in the order in which they begin forward: the root's first, the replicated parameters' last.

    Raises:
        ParamError: For a parameter of a dtype that no plan knows.
    """
    if replicates_frozen(fsdp, shard):
        policy = FrozenPolicy.REPLICATE
    members = assign_parameters(model, fsdp, groups, replicated, trace)
    last = _last_units(model, [modules for modules, _ in members], trace)
    recomputed = recomputed_modules(model, fsdp, trace)
    # A unit around others starts first and ends last.
    by_end = sorted(range(len(members)), key=lambda order: trace.last_end(members[order][0]))
    end_places = {order: place for place, order in enumerate(by_end)}
    units = []
    for order, (modules, params) in enumerate(members):
        unit = Unit(
            name=unit_name(modules),
            modules=modules,
            params=tuple(params),
            order=order,
            forward_end=end_places[order],
            kind=UnitKind.of(p.trainable for p in params),
            compute_dtype=compute_dtype(params, fsdp),
            grad_flow=_has_grad_flow(modules, params, fsdp, trace),
            recomputed=_is_inside(params, recomputed),
            sharded=fsdp.effective_backend.rules.shards,
        )
        if unit.kind is UnitKind.FROZEN:
            # What must be replicated has a unit of its own, so its first parameter tells.
            if not unit.sharded or params[0].name in replicated:
                unit = _with_policy(unit, FrozenPolicy.REPLICATE)
            else:
                unit = _with_policy(unit, policy)
        if unit.sharded:
            unit = _with_resharding(unit, fsdp, stays=modules in last)
        units.append(with_bytes(unit, fsdp, shard))
    return tuple(units)


def replicates_frozen(fsdp: FSDPParams, shard: int) -> bool:
    """Return True if frozen units are replicated whatever their policy, since one rank alone along the axis holds them.

    FSDP2 on such an axis still copies each parameter by itself, on the stream of compute, each time that it "gathers" a
    unit (_fsdp_param_group.py, wait_for_unshard, world size 1). FSDP1 casts its flat parameter as often.

    Args:
        fsdp: How to shard and gather.
        shard: Ranks along the shard axis of the mesh.
    """
    if shard > 1 or not fsdp.effective_backend.rules.shards:
        return False
    # Sharded weights are offloaded to the host, and cast where they rest in other bits than they compute in.
    return not fsdp.cpu_offload and can_replicate(fsdp)


def can_replicate(fsdp: FSDPParams) -> bool:
    """Return False if replicated frozen weights would compute in another dtype than their inputs have.

    FSDP casts the inputs of the units that it shards. Nothing casts the inputs of a replicated unit.
    """
    compute = fsdp.mixed_precision
    if fsdp.autocast_precision:  # it takes weights of any 16 bits
        compute = fsdp.frozen_precision
    return fsdp.frozen_precision in (None, compute)


def assign_parameters(
    model: nn.Module, fsdp: FSDPParams, groups: list[list[str]], replicated: set[str], trace: Trace
) -> list[tuple[Modules, list[Param]]]:
    """Return each unit's modules and parameters: the root's first, the replicated ones last."""
    groups = sorted(groups, key=trace.first_start)
    root: list[Param] = []
    apart: list[Param] = []
    by_group: dict[int, list[Param]] = defaultdict(list)
    for p in plan_parameters(model, fsdp):
        owner = owning_group(p.name, groups)
        if p.name in replicated:
            apart.append(p)
        elif owner is None:
            root.append(p)
        else:
            by_group[owner].append(p)
    members: list[tuple[Modules, list[Param]]] = [(("",), root)]
    for index, group in enumerate(groups):
        # Groups further inside may hold all that is in a group. The root stays even so: it starts the other units.
        if by_group[index]:
            members.append((tuple(group), by_group[index]))
    if apart:
        members.append((tuple(dict.fromkeys(p.name.rpartition(".")[0] for p in apart)), apart))
    return members


def plan_parameters(model: nn.Module, fsdp: FSDPParams) -> list[Param]:
    """Return every parameter once, with its dtype at rest. Raises ParamError for a dtype that ITEMSIZE lacks."""
    params = []
    for (first, *aliases), p in named_tensors(model):
        if not isinstance(p, nn.Parameter):
            continue
        dtype = str(p.dtype).removeprefix("torch.")
        # quantize.py: a frozen matrix may rest as two parameters, its codes and its scales, named after the matrix.
        count = count_weights(model, first, p)
        if fsdp.frozen_precision and not p.requires_grad and p.is_floating_point() and not count:
            dtype = fsdp.frozen_precision.torch_name
        if dtype not in ITEMSIZE or (dtype.startswith("float8") and not count):
            raise ParamError("model", f"{first} is {dtype}; make it a buffer, or cast it to float32 or bfloat16")
        if fsdp.mixed_precision and p.requires_grad and ITEMSIZE[dtype] == 2:
            # 16 bits would round the optimizer's small steps away (Micikevicius et al. 2018, section 3.1).
            dtype = "float32"
        decay = p.requires_grad and decays(model, [first, *aliases], ndim=p.ndim)
        if count is not None:
            aliases = [matrix_name(first)]
        params.append(Param(first, tuple(p.shape), dtype, p.requires_grad, tuple(aliases), decay, num_weights=count))
    return params


def decays(model: nn.Module, names: Sequence[str], *, ndim: int) -> bool:
    """Return True if weight decay is for this parameter: a matrix that is no norm, bias, gate or embedding.

    names: all of a tied parameter's, in the unwrapped model.
    """
    for name in names:
        path, _, key = name.rpartition(".")
        owner = type(model.get_submodule(path)).__name__
        if "Embedding" in owner or path.endswith("new_tokens") or key.endswith(EMBEDDING_ENDINGS):
            return False
    return ndim > 1


def unit_name(modules: Modules) -> str:
    """Return the module's name; for several modules the keys that differ, in braces: layers.0.{attn,ff}."""
    if len(modules) == 1:
        return modules[0] or ROOT
    around = common_module(modules)
    keys = "{" + ",".join(name.removeprefix(f"{around}.") for name in modules) + "}"
    return f"{around}.{keys}".lstrip(".")


def compute_dtype(params: list[Param], fsdp: FSDPParams) -> str:
    """Return mixed precision's dtype; else fp32 if frozen weights rest in fewer bits; else empty: each its own."""
    if fsdp.mixed_precision:
        return fsdp.mixed_precision.torch_name
    if fsdp.frozen_precision and not all(p.trainable for p in params):
        return "float32"
    return ""


def _has_grad_flow(modules: Modules, params: list[Param], fsdp: FSDPParams, trace: Trace) -> bool:
    """Return True if backward needs the unit's weights: not if it is frozen and its input needs no gradient."""
    if any(p.trainable or p.name in trace.grad_flow for p in params):
        return True
    if params and fsdp.effective_backend.rules.flat:
        # FSDP1 gathers a unit as soon as the output of its module has a gradient, whichever part of it needs that.
        return not trace.returns_gradient.isdisjoint(modules)
    return False


def _is_inside(params: list[Param], modules: list[str]) -> bool:
    """Return True if one of the parameters is inside one of the modules, by one of its names."""
    names: list[str] = []
    for p in params:
        names += [p.name, *p.aliases]
    return contains(modules, names)


def _with_policy(unit: Unit, policy: FrozenPolicy) -> Unit:
    """Return a frozen unit with its policy."""
    if unit.is_root and unit.sharded and policy is FrozenPolicy.REPLICATE:
        # FSDP must wrap the root, which starts all other units.
        policy = FrozenPolicy.SHARD
    unit = replace(unit, frozen_policy=policy)
    if policy is not FrozenPolicy.REPLICATE or not unit.sharded:
        return unit
    # FSDP does not cast what it does not shard, so it rests in the dtype that it computes in.
    params = [replace(p, dtype=unit.computed_dtype(p)) for p in unit.params]
    return replace(unit, sharded=False, params=tuple(params))


def _with_resharding(unit: Unit, fsdp: FSDPParams, *, stays: bool) -> Unit:
    """Return a sharded unit that knows when its unsharded weights are freed.

    stays: backward begins with it, so freeing it after forward saves nothing.
    """
    # The sharding strategy is for trainable and mixed units, the frozen policy for frozen ones.
    keep = unit.frozen_policy is FrozenPolicy.KEEP
    if unit.kind is not UnitKind.FROZEN:
        keep = not fsdp.sharding_strategy.reshard_after_forward
    # The root stays: backward would gather it again immediately. What backward does not need may always go.
    reshard = not unit.is_root and not (unit.needed_in_backward and (keep or stays))
    # FSDP1 has one switch for both: what it keeps after forward it frees after backward, unless under `no_sync`.
    reshard_after_backward = reshard
    if fsdp.effective_backend.rules.by_parameter:
        reshard_after_backward = not keep
    return replace(unit, reshard_after_forward=reshard, reshard_after_backward=reshard_after_backward)


def _last_units(model: nn.Module, units: list[Modules], trace: Trace) -> set[Modules]:
    """Return the innermost unit that ends forward last, the units around it, and all that end after the layer before.

    Backward begins with them. If they were freed after forward, backward would gather them again immediately.
    """
    innermost = []
    for unit in units:
        if not any(contains(unit, other) for other in units if other != unit):
            innermost.append(unit)
    last = max(innermost, key=trace.last_end)
    layers_end = 0.0
    for unit in innermost:
        around = {model.get_submodule(module) for path in unit for module in ancestors(path)}
        # A unit is often less than a layer, such as one of several bare matrices: any list around it will do.
        if unit != last and any(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in around):
            layers_end = max(layers_end, trace.last_end(unit))
    return {unit for unit in units if unit == last or contains(unit, last) or trace.last_end(unit) > layers_end}


def buffer_bytes(model: nn.Module, fsdp: FSDPParams) -> int:
    """Return the bytes of the model's buffers on every rank."""
    total = 0
    for buffer in model.buffers():
        itemsize = buffer.itemsize
        if fsdp.buffer_dtype and buffer.is_floating_point():
            itemsize = ITEMSIZE[fsdp.buffer_dtype.torch_name]
        total += buffer.numel() * itemsize
    return total


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of its name in a plan: float32, bfloat16, ..."""
    return getattr(torch, name)
