"""The collectives of one optimizer step, and the bytes that one rank sends in them (`ring_bytes` of core/plan.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.plan import UnitCollectives, WrapPlan, ring_bytes
from ..params import TrainParams

CONTROL_CALLS = 2
CONTROL_BYTES = (2 + 4) * 8
"""`train_step` calls two small all-reduces a step, in float64: the numbers of label tokens and samples; then the loss,
the squared gradient norm, whether a stop was requested, and a check that ranks used the same parts of the model
(core/same_parts.py). Each data source beyond the first adds a number to both."""

PLACES = (
    ("all-gather", "forward"),
    ("all-gather", "backward"),
    ("reduce-scatter", "backward"),
    ("all-reduce", "backward"),
    ("all-gather", "optimizer"),
)
"""(kind, phase) of the collectives of units, in the order of a step."""


@dataclass(frozen=True)
class CollectiveCount:
    """The collectives of one kind in one phase of an optimizer step, as one rank sees them: predicted, or counted."""

    kind: str
    """all-gather, reduce-scatter, all-reduce or broadcast."""
    phase: str
    """forward, backward, optimizer, or control (an all-reduce outside of them)."""
    count: int
    bytes: int
    """Bytes of the full tensors: the parts of all ranks together."""
    wire_bytes: int
    """Bytes that this rank sends."""


def collectives(plan: WrapPlan, train: TrainParams, sources: int = 1) -> tuple[CollectiveCount, ...]:
    """Return the collectives of one optimizer step: gathers, reductions (in DDP one all-reduce), and control."""
    micro_steps = train.accumulation * sources
    control_bytes = CONTROL_BYTES + 2 * 8 * (sources - 1)
    found: dict[tuple[str, str], list[UnitCollectives]] = {place: [] for place in PLACES}
    for unit in plan.units:
        for each in plan.collectives_of(unit, micro_steps):
            if each.bytes:
                found[each.kind, each.phase].append(each)
    found["all-reduce", "control"] = [
        UnitCollectives("all-reduce", "control", CONTROL_CALLS, control_bytes, plan.world_size)
    ]
    rows = []
    for (kind, phase), each_unit in found.items():
        if each_unit and each_unit[0].ranks > 1:
            nbytes, ranks = sum(each.bytes for each in each_unit), each_unit[0].ranks
            count = sum(each.count for each in each_unit)
            if phase != "control" and not plan.rules.shards:
                count = 1  # DDP sends one all-reduce for each bucket; counted as one
            rows.append(CollectiveCount(kind, phase, count, nbytes, ring_bytes(kind, nbytes, ranks)))
    return tuple(rows)
