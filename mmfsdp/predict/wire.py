"""The collectives of one optimizer step, and the bytes that one rank sends in them (`ring_bytes` of core/plan.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.plan import WrapPlan, ring_bytes
from ..params import TrainParams

CONTROL_CALLS = 2
CONTROL_BYTES = (2 + 4) * 8
"""`train_step` calls two small all-reduces a step, in float64: the numbers of label tokens and samples; then the loss,
the squared gradient norm, whether a stop was requested, and a check that ranks used the same parts of the model
(core/same_parts.py). Each data source beyond the first adds a number to both."""


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind in one phase of an optimizer step, as one rank sees them: predicted, or counted."""

    kind: str
    """all-gather, reduce-scatter, all-reduce or broadcast."""
    phase: str
    """forward, backward, or control (an all-reduce outside backward)."""
    count: int
    bytes: int
    """Of the full tensors, the parts of all ranks together."""
    wire_bytes: int
    """Bytes that this rank sends."""


def collectives(plan: WrapPlan, train: TrainParams, sources: int = 1) -> tuple[CollectiveCount, ...]:
    """Return the collectives of one optimizer step: gathers, reductions (in DDP one all-reduce), and control."""
    micro_steps = train.accumulation * sources
    control_bytes = CONTROL_BYTES + 2 * 8 * (sources - 1)
    rows: list[CollectiveCount] = []

    def add(kind: str, phase: str, count: int, nbytes: int, ranks: int) -> None:
        if count and ranks > 1:
            rows.append(CollectiveCount(kind, phase, count, nbytes, ring_bytes(kind, nbytes, ranks)))

    for phase in ("forward", "backward"):
        count = total = 0
        for unit in plan.sharded_units:
            gathers = unit.gathers(phase, micro_steps)
            count += gathers
            total += gathers * unit.unsharded_bytes
        add("all-gather", phase, count, total, plan.shard)
    if not plan.rules.shards:
        total = sum(unit.reduced_bytes for unit in plan.units)
        if total:  # DDP sends one all-reduce for each bucket; counted as one
            add("all-reduce", "backward", 1, total, plan.world_size)
    else:
        count = total = 0
        for unit in plan.sharded_units:
            count += unit.reductions(micro_steps)
            total += unit.reduced_bytes * unit.reductions(micro_steps)
        add("reduce-scatter", "backward", count, total, plan.shard)
        add("all-reduce", "backward", count, total // plan.shard, plan.replicate)
    add("all-reduce", "control", CONTROL_CALLS, control_bytes, plan.world_size)
    return tuple(rows)
