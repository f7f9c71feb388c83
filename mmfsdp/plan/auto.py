"""FrozenPolicy.AUTO: for each frozen unit the policy with which a step sends least, within a budget of memory.

A unit with grad flow saves two gathers when it is replicated and one when it is kept, for about the same memory; one
without saves only one. Choices are added up unit by unit, the largest first, and of those that hold and send more
than another none is followed further: exact, until there are more than `STATES` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..params import FrozenPolicy, ParamError
from .cost import gather_buffer, reduce_buffer, shard_bytes
from .table import sent, size
from .units import Unit, WrapPlan

STATES = 1000
"""Choices followed at a time; beyond, of near ones in memory only one."""
LATENCY_BYTES = 256 * 1024
"""What could be sent in the time that a collective takes to begin (30 microseconds at 9 GB/s)."""


@dataclass(frozen=True)
class _State:
    memory: int
    wire: int
    picks: tuple[int, ...] = ()


def choose(plans: Sequence[WrapPlan], *, budget: int) -> WrapPlan:
    """The best mix of plans that differ only in what they do with frozen units, one each for SHARD, KEEP, REPLICATE.

    budget: bytes that a rank may hold, activations apart. Raises ParamError if even the least does not fit.
    """
    base = plans[0]
    order = sorted(range(len(base.units)), key=lambda i: -base.units[i].gathered_bytes)
    frontier: dict[tuple[int, bool], list[_State]] = {(0, False): [_State(_fixed(base), 0)]}
    for i in order:
        reached: dict[tuple[int, bool], list[_State]] = {}
        for (slots, buffered), states in frontier.items():
            for pick, unit in _options([p.units[i] for p in plans]):
                held, key = _adds(base, unit, slots, buffered)
                wire = sent(base, unit)
                more = [_State(s.memory + held, s.wire + wire, (*s.picks, pick)) for s in states]
                reached.setdefault(key, []).extend(more)
        frontier = {key: _best(states, budget) for key, states in reached.items()}
    states = _best([s for found in frontier.values() for s in found], budget)
    fit = [s for s in states if s.memory <= budget]
    least = states[0]
    if not fit:
        raise ParamError(
            "memory_budget_gib",
            f"{budget / 2**30:.3f} is {size(least.memory - budget)} too little: the least that a rank can hold is "
            f"{size(least.memory)} (with {_words(base, _mixed(plans, order, least))}); set it to "
            f"{least.memory / 2**30 + 5e-4:.3f}, shard over more ranks, or lower frozen_dtype",
        )
    units = _mixed(plans, order, fit[-1])
    why = (
        f"AUTO: {_words(base, units)}; a rank holds {size(fit[-1].memory)} of {size(budget)} and sends "
        f"{size(fit[-1].wire)} a step, with all SHARD {size(sum(sent(base, u) for u in base.units))}"
    )
    return replace(base, units=units, why=why)


def ddp_is_as_good(plan: WrapPlan) -> bool:
    """True where nothing frozen moves any more, and DDP's fewer collectives outweigh the bytes it sends more."""
    moved = [u for u in plan.units if u.sharded and u.params]
    if plan.replicate > 1 or any(u.kind != "trainable" for u in moved):
        return False
    calls = sum(u.gathers_forward + u.gathers_backward + 1 for u in moved)
    ddp = 2 * sum(p.numel * 4 for u in moved for p in u.params) * (plan.world_size - 1) // plan.world_size
    return ddp - sum(sent(plan, u) for u in moved) < LATENCY_BYTES * (calls - 1)


def memory_of(plan: WrapPlan) -> int:
    """Bytes that a rank holds, activations apart."""
    total, slots, buffered = _fixed(plan), 0, False
    for unit in sorted(plan.units, key=lambda u: -u.gathered_bytes):
        held, (slots, buffered) = _adds(plan, unit, slots, buffered)
        total += held
    return total


def _fixed(plan: WrapPlan) -> int:
    """Gradients, optimizer states and reduction buffers: no matter of frozen units."""
    return 3 * sum(shard_bytes(plan, u) for u in plan.units) + reduce_buffer(plan)


def _adds(plan: WrapPlan, unit: Unit, slots: int, buffered: bool) -> tuple[int, tuple[int, bool]]:
    """Bytes that a unit adds: at rest, gathered if it stays so or is among the two largest others, and once the buffer
    that gathers pass through."""
    held = unit.held_bytes
    if unit.sharded and unit.params:
        if not unit.reshard_after_forward:
            held += unit.gathered_bytes
        elif slots < 2:
            held += unit.gathered_bytes
            slots += 1
        if not buffered:
            held += gather_buffer(plan, unit)
            buffered = True
    return held, (slots, buffered)


def _options(alike: Sequence[Unit]) -> list[tuple[int, Unit]]:
    """(place, unit) of what differs."""
    found: list[tuple[int, Unit]] = []
    for i, unit in enumerate(alike):
        if all(_look(unit) != _look(other) for _, other in found):
            found.append((i, unit))
    return found


def _look(unit: Unit) -> tuple:
    return (unit.sharded, unit.reshard_after_forward, unit.gathers_backward, unit.held_bytes, unit.hold)


def _best(states: list[_State], budget: int) -> list[_State]:
    """Those within the budget (else the least) that no other beats in both, by memory; thinned where they are many."""
    found: list[_State] = []
    for s in sorted(states, key=lambda s: (s.memory, s.wire)):
        if not found or s.wire < found[-1].wire:
            found.append(s)
    found = [s for s in found if s.memory <= budget] or found[:1]
    if len(found) <= STATES:
        return found
    step = (found[-1].memory - found[0].memory) / STATES
    thin = {int((s.memory - found[0].memory) / step): s for s in reversed(found)}  # the least of each stretch
    return sorted({*thin.values(), found[-1]}, key=lambda s: s.memory)


def _mixed(plans: Sequence[WrapPlan], order: list[int], state: _State) -> tuple[Unit, ...]:
    pick = dict(zip(order, state.picks, strict=True))
    return tuple(plans[pick[i]].units[i] for i in range(len(order)))


def _words(plan: WrapPlan, units: tuple[Unit, ...]) -> str:
    """How many frozen units, and of which kind, got which policy."""
    parts = []
    for policy in (FrozenPolicy.REPLICATE, FrozenPolicy.KEEP, FrozenPolicy.SHARD):
        chosen = [u for u in units if u.frozen_policy is policy]
        flow = sum(u.grad_flow for u in chosen)
        if chosen:
            parts.append(f"{policy} {len(chosen)} ({flow} with grad flow)")
    return ", ".join(parts) + " frozen units" if parts else "nothing frozen to choose for"
