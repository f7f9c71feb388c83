"""make_plan: which parameters share a shard, what each rank will hold and send. Plain data, before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..params import Backend, FrozenPolicy, FSDPParams, ParamError, Precision, ShardingStrategy, TrainParams
from .units import ITEMSIZE, ROOT, Finding, Moment, Param, Unit, WrapPlan

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "ITEMSIZE",
    "ROOT",
    "Finding",
    "Moment",
    "Param",
    "Unit",
    "WrapPlan",
    "describe",
    "make_plan",
    "mesh_shape",
    "with_moments",
]


def describe(model: nn.Module) -> WrapPlan:
    """The plan of a model that somebody has wrapped, read back from it, with the lint's findings.

    Raises ValueError for a model that is not wrapped.
    """
    from .wrapped import read_back

    return read_back(model)


def make_plan(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    world_size: int,
    example: dict[str, Any] | None = None,
    train: TrainParams | None = None,
    counted: Callable[[WrapPlan], WrapPlan] | None = None,
) -> WrapPlan:
    """Plan how a model will be wrapped. Needs no process group and no weights: the meta device will do.

    example: keyword arguments of one forward (their values do not matter). With it, the order of units and where
    backward goes are seen rather than assumed from the order in which modules were registered, and AUTO's budget counts
    activations. train: of what steps. counted: gives a plan its moments for AUTO, where there is no example.
    Raises ParamError for a choice that cannot be kept, ValueError for an example that the model does not take.
    """
    from .auto import choose
    from .build import buffer_bytes, build_units, with_prefetch  # here, so that reading a plan needs no torch
    from .checkpointing import with_recomputed
    from .group import group
    from .lint import lint
    from .ties import beside_trainable, join_tied, split_for_fsdp1
    from .trace import trace

    params = params or FSDPParams()
    replicates, shard = mesh_shape(params, world_size)
    seen = trace(model, example)
    groups = group(model, params, seen)
    whole: set[str] = set()
    if params.effective_backend is Backend.FSDP1:
        groups, whole = split_for_fsdp1(model, groups)
        if also := beside_trainable(model, groups, whole):
            seen = replace(seen, flow=seen.flow | trace(model, example, also).flow)
    else:
        groups = join_tied(model, groups, seen)

    def made(policy: FrozenPolicy) -> WrapPlan:
        fsdp = replace(params, frozen_policy=policy, memory_budget_gib=None)
        units = build_units(model, fsdp, groups, whole, seen, shard=shard)
        _refuse_units(fsdp, units)
        held = buffer_bytes(model, params)
        plan = WrapPlan(params, world_size, replicates, shard, units, buffer_bytes=held)
        return replace(plan, units=with_recomputed(model, plan, seen))

    if counted is None and example is not None:
        counted = partial(with_moments, model, example=example)
    if params.frozen_policy is FrozenPolicy.AUTO:
        alike = [made(policy) for policy in _POLICIES]
        budget = int((params.memory_budget_gib or 0) * 2**30)
        plan = choose(alike, budget=budget, moments=counted(alike[0]).moments if counted else (), train=train)
        plan = _ddp(model, plan, example, counted, train) or plan
    else:
        plan = made(params.frozen_policy)
    plan = replace(plan, units=with_prefetch(plan.units, plan.fsdp))
    plan = replace(plan, lint=lint(model, plan, seen=seen))
    return counted(plan) if counted and example is not None and not plan.refused else plan


def with_moments(model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> WrapPlan:
    """The plan with the moments and the work of one micro-step, by which peak and time are predicted; its units stay,
    but what gets no gradient is known as such.

    example: keyword arguments of a forward; values do not matter. Raises ValueError where the model does not take it.
    """
    from .activity import record, with_recorded

    return with_recorded(plan, record(model, plan, example))


_POLICIES = tuple(policy for policy in FrozenPolicy if policy is not FrozenPolicy.AUTO)


def _ddp(
    model: nn.Module,
    plan: WrapPlan,
    example: dict[str, Any] | None,
    counted: Callable[[WrapPlan], WrapPlan] | None,
    train: TrainParams | None,
) -> WrapPlan | None:
    """The plan as DDP, where that is as good, fits, and can honor the other choices."""
    from .auto import ddp_is_as_good, held_by
    from .table import size

    if not ddp_is_as_good(plan, train):
        return None
    budget = (plan.fsdp.memory_budget_gib or 0) * 2**30
    try:
        fsdp = replace(
            plan.fsdp,
            backend=Backend.DDP,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            frozen_policy=FrozenPolicy.REPLICATE,
            memory_budget_gib=None,
        )
        ddp = make_plan(model, fsdp, world_size=plan.world_size, example=example)
    except ParamError:
        return None
    held = held_by(counted(ddp) if counted and not (ddp.moments or ddp.refused) else ddp, train)[0]
    if held > budget or any(f.code == "never-used" for f in ddp.lint):
        return None
    why = "so little trains that one all-reduce of it is cheaper than to shard it: DDP, with which a rank holds"
    return replace(ddp, why=f"{plan.why}; {why} {size(held)}")


def _refuse_units(params: FSDPParams, units: tuple[Unit, ...]) -> None:
    """Raise ParamError for what this model's units do not allow."""
    for unit in units:
        if params.use_orig_params is False and unit.kind == "mixed":
            frozen = next(p.name for p in unit.params if not p.trainable)
            raise ParamError(
                "use_orig_params",
                f"False needs units that are all frozen or all trainable, and {unit.name} is mixed (it holds the "
                f"frozen {frozen}); remove it or set auto_wrap_policy to FROZEN_AWARE",
            )
        whole = not unit.sharded and any(not p.trainable for p in unit.params)
        computed = params.mixed_precision
        if params.effective_backend is Backend.DDP and computed is not Precision.FP32:
            computed = computed and params.frozen_dtype  # autocast takes weights of any 16 bits
        if whole and params.frozen_dtype and params.frozen_dtype is not computed:
            raise ParamError(
                "frozen_dtype",
                f"{params.frozen_dtype} weights that every rank holds whole ({unit.name}) are computed with as they "
                f"are, and would meet {params.mixed_precision or 'fp32'}; set mixed_precision to "
                f"{params.frozen_dtype}, too, or frozen_policy to SHARD or KEEP",
            )


def mesh_shape(params: FSDPParams, world_size: int, *, ranks_per_node: int | None = None) -> tuple[int, int]:
    """(replicate, shard): ranks along each axis of the mesh. Raises ParamError if they do not make the world size."""
    if params.effective_backend is Backend.DDP:
        return world_size, 1
    if not params.sharding_strategy.hybrid:
        return 1, world_size
    replicate, shard = params.dp_replicate, params.dp_shard
    if replicate is None and shard is None:
        shard = min(ranks_per_node or world_size, world_size)
    if replicate is None or shard is None:
        name, given = ("dp_replicate", replicate) if shard is None else ("dp_shard", shard)
        assert given
        if world_size % given:
            fits = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise ParamError(name, f"{given} does not divide the {world_size} ranks; choose one of {fits}")
        replicate, shard = replicate or world_size // given, shard or world_size // given
    if replicate * shard != world_size:
        raise ParamError(
            "dp_replicate",
            f"{replicate} x dp_shard {shard} makes {replicate * shard} ranks, not {world_size}; change one of them",
        )
    if shard == 1 < replicate and params.backend is Backend.FSDP1:
        raise ParamError(
            "dp_shard",
            "1 leaves FSDP1 nothing to shard; raise it, or set sharding_strategy to NO_SHARD or backend to FSDP2",
        )
    return replicate, shard
