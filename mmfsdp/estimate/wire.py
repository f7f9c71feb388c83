"""The collectives of one optimizer step, and the bytes that one rank sends in them (`ring_bytes` of core/plan.py)."""

from __future__ import annotations

from ..core.plan import CollectiveCount, WrapPlan, ring_bytes
from ..params import Backend, TrainParams

CONTROL_CALLS = 2
CONTROL_BYTES = (2 + 3) * 8
"""`train_step` calls two small all-reduces a step, in float64: the numbers of label tokens and samples; then the loss,
the squared gradient norm and whether a stop was requested. Each data source beyond the first adds a number to both."""


def collectives(plan: WrapPlan, train: TrainParams, sources: int = 1) -> tuple[CollectiveCount, ...]:
    """Return the collectives of one optimizer step."""
    micro_steps = train.accumulation * sources
    control_bytes = CONTROL_BYTES + 2 * 8 * (sources - 1)
    rows: list[CollectiveCount] = []
    for phase in ("forward", "backward"):
        count = total = 0
        for unit in plan.sharded_units:
            gathers = unit.gathers(phase, micro_steps)
            count += gathers
            total += gathers * unit.unsharded_bytes
        rows.append(_ring("all-gather", phase, count, total, plan.shard))
    rows += _reductions(plan, micro_steps)
    rows.append(_ring("all-reduce", "control", CONTROL_CALLS, control_bytes, plan.world_size))
    return tuple(row for row in rows if row.count)


def _reductions(plan: WrapPlan, micro_steps: int) -> list[CollectiveCount]:
    """Return a reduce-scatter per sharded unit, then an all-reduce over the replicas; in DDP one all-reduce."""
    if plan.backend is Backend.DDP:
        reduced = sum(u.reduced_bytes for u in plan.units)
        # DDP sends one all-reduce for each bucket; counted as one.
        count = 1 if reduced else 0
        return [_ring("all-reduce", "backward", count, reduced, plan.world_size)]
    count = total = 0
    for unit in plan.sharded_units:
        count += unit.reductions(micro_steps)
        total += unit.reduced_bytes * unit.reductions(micro_steps)
    return [
        _ring("reduce-scatter", "backward", count, total, plan.shard),
        _ring("all-reduce", "backward", count, total // plan.shard, plan.replicate),
    ]


def _ring(kind: str, phase: str, count: int, nbytes: int, ranks: int) -> CollectiveCount:
    if ranks == 1 or not count:
        return CollectiveCount(kind, phase, 0, 0, 0)
    return CollectiveCount(kind, phase, count, nbytes, ring_bytes(kind, nbytes, ranks))
