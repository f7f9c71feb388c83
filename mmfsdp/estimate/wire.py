"""The collectives of one optimizer step, and the bytes that one rank sends in them (`ring_bytes` of core/plan.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.plan import Unit, WrapPlan, ring_bytes
from ..params import Backend, TrainParams

CONTROL_CALLS = 2
CONTROL_BYTES = 40
"""`train_step` calls two small all-reduces a step, in float64: the numbers of label tokens and samples; then the loss,
the squared gradient norm and whether a stop was requested. Each data source beyond the first adds a number to both."""


@dataclass(frozen=True)
class Wire:
    """One kind of collective in one optimizer step, as one rank sees it."""

    kind: str
    """all-gather, reduce-scatter, all-reduce or broadcast."""
    phase: str
    """forward, backward or control."""
    count: int
    bytes: int
    """Of the whole tensors, all ranks' parts together."""
    wire_bytes: int
    """Sent by this rank."""


def collectives(plan: WrapPlan, train: TrainParams, sources: int = 1) -> tuple[Wire, ...]:
    """Return the collectives of one optimizer step."""
    micro_steps = train.accumulation * sources
    sharded = [u for u in plan.units if u.sharded]
    broadcasts = [nbytes for kind, _, nbytes in plan.other_collectives if kind == "broadcast"]
    control_bytes = CONTROL_BYTES + 16 * (sources - 1)
    rows = [_ring("broadcast", "forward", len(broadcasts), sum(broadcasts), plan.world_size)]
    for phase in ("forward", "backward"):
        count = total = 0
        for unit in sharded:
            gathers = unit.gathers_forward if phase == "forward" else unit.gathers_backward
            if unit.reshard_after_backward:  # else it is gathered in the first micro-step only
                gathers *= micro_steps
            count += gathers
            total += gathers * unit.unsharded_bytes
        rows.append(_ring("all-gather", phase, count, total, plan.shard))
    rows += _reductions(plan, sharded, micro_steps)
    rows.append(_ring("all-reduce", "control", CONTROL_CALLS, control_bytes, plan.world_size))
    return tuple(row for row in rows if row.count)


def _reductions(plan: WrapPlan, sharded: list[Unit], micro_steps: int) -> list[Wire]:
    """Return a reduce-scatter per sharded unit, then an all-reduce over the replicas; in DDP one all-reduce."""
    if plan.backend is Backend.DDP:
        reduced = sum(u.reduced_bytes for u in plan.units)
        reduced += sum(nbytes for kind, _, nbytes in plan.other_collectives if kind == "all-reduce")
        return [_ring("all-reduce", "backward", min(1, reduced), reduced, plan.world_size)]
    count = sum(u.reductions(micro_steps) for u in sharded)
    total = sum(u.reduced_bytes * u.reductions(micro_steps) for u in sharded)
    return [
        _ring("reduce-scatter", "backward", count, total, plan.shard),
        _ring("all-reduce", "backward", count, total // plan.shard, plan.replicate),
    ]


def _ring(kind: str, phase: str, count: int, nbytes: int, ranks: int) -> Wire:
    if ranks == 1 or not count:
        return Wire(kind, phase, 0, 0, 0)
    return Wire(kind, phase, count, nbytes, ring_bytes(kind, nbytes, ranks))
