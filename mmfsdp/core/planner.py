"""Plan the units of a model for one policy, before any rank starts.

`make_plan` of planning.py calls this, chooses the policies of AUTO, and predicts memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..params import HYBRID, FrozenPolicy, FSDPParams, ParamError
from .group import group_modules
from .plan import Unit, UnitKind, WrapPlan
from .trace import Trace, trace
from .units import buffer_bytes, build_units, can_replicate
from .wrapper import Wrapper


@dataclass(frozen=True)
class Grouped:
    """A traced model and its groups of modules: units without policy, dtypes and bytes."""

    trace: Trace
    groups: list[list[str]]
    replicated: set[str]
    """Parameters that FSDP1 cannot shard."""


def trace_and_group(model: nn.Module, params: FSDPParams, example: dict[str, Any] | None) -> Grouped:
    """Trace the model and group its modules."""
    first_trace = trace(model, example, fsdp=params)
    groups, replicated = group_modules(model, params, first_trace)
    wrapper: Wrapper = params.effective_backend.load()
    trained_too = wrapper.trained_too(model, params, groups, replicated, first_trace)
    if trained_too:  # then backward passes through more
        second_trace = trace(model, example, trained_too, fsdp=params)
        first_trace.grad_flow |= second_trace.grad_flow
        first_trace.returns_gradient |= second_trace.returns_gradient
    return Grouped(first_trace, groups, replicated)


def plan_units(
    model: nn.Module, params: FSDPParams, policy: FrozenPolicy, grouped: Grouped, world_size: int
) -> WrapPlan:
    """Return the plan with one policy for all frozen units. Its all-gathers are not counted yet.

    Args:
        model: The plain model, quantized as it will be.
        params: How to shard and gather.
        policy: The policy of the frozen units; not AUTO.
        grouped: What `trace_and_group` has found.
        world_size: Number of ranks.

    Returns:
        The plan, without findings. `with_gathers` of predict/gathers.py counts its all-gathers.

    Raises:
        ParamError: If the number of ranks or the units do not allow one of `params`.
    """
    replicate, shard = mesh_shape(params, world_size)
    units = build_units(model, params, policy, grouped.groups, grouped.replicated, grouped.trace, shard=shard)
    check_units(params, units)
    return WrapPlan(params, world_size, replicate, shard, units, buffer_bytes=buffer_bytes(model, params))


def check_units(params: FSDPParams, units: tuple[Unit, ...]) -> None:
    """Raise ParamError for choices that this model's units do not allow."""
    for unit in units:
        if params.use_orig_params is False and unit.kind is UnitKind.MIXED:
            raise ParamError(
                "use_orig_params",
                f"False needs units that are all frozen or all trainable, and {unit.name} is mixed; remove it or set "
                "auto_wrap_policy to FROZEN_AWARE",
            )
        holds_frozen = unit.kind in (UnitKind.FROZEN, UnitKind.MIXED)
        if holds_frozen and not unit.sharded and not can_replicate(params):
            raise ParamError(
                "frozen_dtype",
                f"every rank holds all of {unit.name} and computes with it in {params.frozen_dtype}, its inputs are in "
                f"{params.mixed_precision or 'fp32'}; set mixed_precision to {params.frozen_dtype} as well, or "
                "frozen_policy to SHARD or KEEP",
            )


def mesh_shape(params: FSDPParams, world_size: int) -> tuple[int, int]:
    """Return (replicate, shard): ranks along each axis of the mesh. Raises ParamError if they do not fit the world."""
    rules = params.effective_backend.rules
    if not rules.shards:
        return world_size, 1
    if params.sharding_strategy not in HYBRID:  # each rank holds a shard of its own
        return 1, world_size
    if params.dp_shard is None and params.dp_replicate is None:
        raise ParamError(
            "dp_shard",
            f"is unset, as is dp_replicate, and a plan for {world_size} ranks cannot know how many of them a node has; "
            "set dp_shard to that number for one replica per node",
        )
    # An axis without a size gets the ranks that the other one leaves.
    shard = params.dp_shard or max(1, world_size // (params.dp_replicate or 1))
    replicate = params.dp_replicate or world_size // shard
    if replicate * shard != world_size:
        raise ParamError(
            "dp_replicate" if params.dp_replicate else "dp_shard",
            f"dp_replicate {replicate} x dp_shard {shard} makes {replicate * shard} ranks, not {world_size}; set "
            "one of them, or both, to divisors of it",
        )
    if shard == 1 and replicate > 1 and rules.flat:
        raise ParamError(
            "dp_shard",
            "1 leaves FSDP1 nothing to shard; raise it, or set sharding_strategy to NO_SHARD or backend to FSDP2",
        )
    return replicate, shard
