"""FrozenPolicy.AUTO: for each frozen unit the policy with which a step sends least, within a budget of memory.

A unit with grad flow saves two gathers when it is replicated and one when it is kept, for about the same memory; one
without saves only one. Choices are added up unit by unit, the largest first, and of those that hold and send more
than another none is followed further: exact, until there are more than `STATES` of them. Where an example's
activations are known the peak itself decides: of all mixes where they are few, else of those that the sums rank near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, prod

from ..params import FrozenPolicy, ParamError, TrainParams
from .cost import gather_buffer, reduce_buffer, shard_bytes
from .table import sent, size
from .units import Moment, Unit, WrapPlan

STATES = 1000
"""Choices followed at a time; beyond, of near ones in memory only one."""
LOOKED = 150
"""Of these, mixes whose peaks are looked at."""
ALL = 1000
"""So few mixes are all looked at."""
LATENCY_BYTES = 256 * 1024
"""What could be sent in the time that a collective takes to begin (30 microseconds at 9 GB/s)."""


@dataclass(frozen=True)
class _State:
    memory: int
    wire: int
    picks: tuple[tuple[int, int], ...] = ()
    """Unit and policy, by place."""


def choose(
    plans: Sequence[WrapPlan], *, budget: int, moments: Sequence[Moment] = (), train: TrainParams | None = None
) -> WrapPlan:
    """The best mix of plans that differ only in what they do with frozen units, one each for SHARD, KEEP, REPLICATE.

    budget: bytes that a rank may hold. moments: of such a plan's example, for the peak to count; without, all but
    activations is added up. train: of what steps. Raises ParamError if even the least does not fit.
    """
    search = _Search(plans, budget, moments, train)
    units, held = search.best()
    if held > budget:
        raise ParamError(
            "memory_budget_gib",
            f"{budget / 2**30:.3f} is {size(held - budget)} too little: the least that a rank can hold is "
            f"{size(held)} (with {_words(units)}{'' if moments else '; activations apart'}); set it to "
            f"{held / 2**30 + 5e-4:.3f}, shard over more ranks, or lower frozen_dtype",
        )
    most = size(sum(sent(plans[0], u) for u in plans[0].units))
    why = (
        f"AUTO: {_words(units)}; a rank holds {size(held)} of {size(budget)}{' at most' if moments else ''} and sends "
        f"{size(sum(sent(plans[0], u) for u in units))} a step, with all SHARD {most}"
    )
    return replace(plans[0], units=units, why=why)


def peak_by(plan: WrapPlan, *, moments: Sequence[Moment] = (), train: TrainParams | None = None) -> int:
    """The most that a rank holds in a step, by moments that were counted for a plan of the same units, or its own."""
    from ..estimate import estimate  # which reads plans

    return estimate(replace(plan, moments=tuple(moments) or plan.moments), train).peak_bytes or 0


class _Search:
    """Among the mixes, for the one that sends least and fits."""

    def __init__(
        self, plans: Sequence[WrapPlan], budget: int, moments: Sequence[Moment], train: TrainParams | None
    ) -> None:
        self.plans, self.budget, self.moments, self.train = plans, budget, moments, train
        alike = zip(*(p.units for p in plans), strict=True)
        self.options = [[unit for _, unit in _options(units)] for units in alike]
        self.seen: dict[tuple[int, ...], int] = {}

    def best(self) -> tuple[tuple[Unit, ...], int]:
        """(units, bytes held); the least that can be held where nothing fits."""
        if not self.moments:
            found = _frontier(self.plans, self.budget)
            fit = [s for s in found if s.memory <= self.budget][-1:] or found[:1]
            return _mixed(self.plans, fit[0]), fit[0].memory
        if prod(len(options) for options in self.options) <= ALL:
            units = self._first(sorted(product(*self.options), key=self.sent))
        else:  # those that send least first; then what sends less than the first that fits, in part
            found = _frontier(self.plans, float("inf"))[::-1]
            step = ceil(len(found) / LOOKED)
            mixes = [_mixed(self.plans, s) for s in found]
            units = self._first(mixes[::step])
            place = next(i for i, mix in enumerate(mixes) if mix == units)
            units = self._better(self._first(mixes[max(0, place - step) : place + 1]))
        return units, self.held(units)

    def _first(self, mixes: Sequence[tuple[Unit, ...]]) -> tuple[Unit, ...]:
        """The first that fits, else the one that holds least."""
        return next((m for m in mixes if self.held(m) <= self.budget), None) or min(mixes, key=self.held)

    def held(self, units: tuple[Unit, ...]) -> int:
        """The peak with these units."""
        key = tuple(map(id, units))
        if key not in self.seen:
            plan = replace(self.plans[0], units=units)
            self.seen[key] = peak_by(plan, moments=self.moments, train=self.train)
        return self.seen[key]

    def sent(self, units: tuple[Unit, ...]) -> int:
        """Bytes that a rank sends in a step."""
        return sum(sent(self.plans[0], u) for u in units)

    def _better(self, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
        """What sends less and fits, too, one unit changed after the other."""
        wire = partial(sent, self.plans[0])
        for i in sorted(range(len(units)), key=lambda i: -wire(units[i])):
            for other in sorted(self.options[i], key=wire):
                mix = (*units[:i], other, *units[i + 1 :])
                if wire(other) < wire(units[i]) and self.held(mix) <= self.budget:
                    units = mix
        return units


def _frontier(plans: Sequence[WrapPlan], budget: float) -> list[_State]:
    """Mixes that hold less or send less than any other, by what they hold: those within the budget, else the least."""
    base = plans[0]
    order = sorted(range(len(base.units)), key=lambda i: -base.units[i].gathered_bytes)
    frontier: dict[tuple[int, bool], list[_State]] = {(0, False): [_State(_fixed(base), 0)]}
    for i in order:
        reached: dict[tuple[int, bool], list[_State]] = {}
        for (slots, buffered), states in frontier.items():
            for pick, unit in _options([p.units[i] for p in plans]):
                held, key = _adds(base, unit, slots, buffered)
                wire = sent(base, unit)
                more = [_State(s.memory + held, s.wire + wire, (*s.picks, (i, pick))) for s in states]
                reached.setdefault(key, []).extend(more)
        frontier = {key: _best(states, budget) for key, states in reached.items()}
    return _best([s for found in frontier.values() for s in found], budget)


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


def _best(states: list[_State], budget: float) -> list[_State]:
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


def _mixed(plans: Sequence[WrapPlan], state: _State) -> tuple[Unit, ...]:
    return tuple(plans[pick].units[i] for i, pick in sorted(state.picks))


def _words(units: tuple[Unit, ...]) -> str:
    """How many frozen units, and of which kind, got which policy."""
    parts = []
    for policy in reversed(FrozenPolicy):
        chosen = [u for u in units if u.frozen_policy is policy]
        flow = sum(u.grad_flow for u in chosen)
        if chosen:
            parts.append(f"{policy} {len(chosen)} ({flow} with grad flow)")
    return ", ".join(parts) + " frozen units" if parts else "nothing frozen to choose for"
