"""Count the all-gathers of each unit: as many as start in a walk over the events of one micro-step.

With an example the events are recorded, so no rule has to foresee which units run several times, again in backward
(activation checkpointing), or never. Without one they are assumed: each unit runs once, in the order of the plan.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.plan import MemoryEvent, WrapPlan
from ..core.unit_rules import UnitBytesTable
from .memory import StepWalk, memory_at_rest


def with_gathers(plan: WrapPlan) -> WrapPlan:
    """Return the plan with the all-gathers that each unit has in forward and in backward of one micro-step."""
    units = [replace(unit, gathers_forward=0, gathers_backward=0) for unit in plan.units]
    counted = replace(plan, units=tuple(units), memory_events=plan.memory_events or assumed_events(plan))
    # A plan prefetches only units that have gathers of their own, so these are counted first, without prefetch.
    for _ in range(2):
        table = UnitBytesTable(counted)
        walk = StepWalk(counted, memory_at_rest(counted, table), on_cpu=False, offload=False, table=table)
        walk.micro_step(last=True)
        for i, unit in enumerate(counted.units):
            forward, backward = walk.gathers["forward", unit.order], walk.gathers["backward", unit.order]
            units[i] = replace(unit, gathers_forward=forward, gathers_backward=backward)
        counted = replace(counted, units=tuple(units))
    return replace(counted, memory_events=plan.memory_events)


def assumed_events(plan: WrapPlan) -> tuple[MemoryEvent, ...]:
    """Return the events of a micro-step in which each unit runs once. They have no bytes."""
    forward = []
    running: list[tuple[int, int]] = []  # (forward_end, order) of the units that have begun and not ended
    for unit in plan.units:
        while running and running[-1][0] < unit.forward_end:
            forward.append(("post_forward", running.pop()[1]))
        forward.append(("pre_forward", unit.order))
        running.append((unit.forward_end, unit.order))
    for _, order in reversed(running):
        forward.append(("post_forward", order))
    # Backward passes the same points in the opposite order.
    opposite = {"post_forward": "pre_backward", "pre_forward": "post_backward"}
    backward = [(opposite[event], order) for event, order in reversed(forward)]
    return tuple(MemoryEvent(event, order, 0, 0, 0, 0) for event, order in [*forward, *backward, ("end", 0)])
