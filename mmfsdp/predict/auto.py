"""AUTO: search the policy of each frozen unit, so that a rank sends least within a budget of memory.

With `activation_checkpointing` auto it also chooses what backward recomputes: as little as fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..core.optimizer_states import kept_states
from ..core.plan import Unit, WrapPlan
from ..core.planner import Grouped, plan_units
from ..core.unit_rules import UnitBytesTable
from ..params import FrozenPolicy, FSDPParams, ParamError, TrainParams
from ..params.in_words import size
from .gathers import with_gathers
from .memory import step_walk
from .plan_cache import PlanCache
from .timeline import step_timeline

RECOMPUTATIONS = ("none", "every:4", "every:2", "all")
"""Values that `activation_checkpointing` auto tries, the least first. Recomputing all of a frozen language model adds
half of a step's FLOPs, more than the traffic that it makes room to save; so memory alone asks for it."""


def with_least_recomputation(make: Callable[[FSDPParams], WrapPlan], params: FSDPParams) -> WrapPlan:
    """Return the first plan that fits the budget, of those that recompute more and more.

    make: makes the plan of parameters. Raises ParamError if none fits.
    """
    for choice in RECOMPUTATIONS[:-1]:
        try:
            return _chosen(make(params.change(activation_checkpointing=choice)), choice)
        except ParamError as error:
            if error.field != "memory_budget_gib":
                raise
    return _chosen(make(params.change(activation_checkpointing=RECOMPUTATIONS[-1])), RECOMPUTATIONS[-1])


def _chosen(plan: WrapPlan, choice: str) -> WrapPlan:
    return replace(plan, why=f"{plan.why}; activation_checkpointing {choice} is the least that fits")


def choose_policies(
    model: nn.Module,
    params: FSDPParams,
    grouped: Grouped,
    world_size: int,
    example: dict[str, Any],
    train: TrainParams,
    cache: PlanCache,
) -> WrapPlan:
    """AUTO: search a policy for each frozen unit, so that the plan fits `memory_budget_gib` and sends least.

    Args:
        model: The plain model, quantized as it will be.
        params: How to shard and gather, with the budget.
        grouped: What `trace_and_group` has found.
        world_size: Number of ranks.
        example: Keyword arguments of one forward, by which activations are counted.
        train: The step whose peak and traffic are compared.
        cache: Keeps the recording of the example.

    Returns:
        The best plan that was found; its `why` has the choice in words.

    Raises:
        ParamError: If no plan that was tried fits.
    """
    assert params.memory_budget_gib is not None  # FSDPParams refuses AUTO without it
    plans: dict[FrozenPolicy, WrapPlan] = {}
    for policy in FrozenPolicy:
        if policy is not FrozenPolicy.AUTO:
            plans[policy] = plan_units(model, params, policy, grouped, world_size)
    shard = plans[FrozenPolicy.SHARD]
    events = cache.record(model, shard, example).memory_events  # the same for every policy
    states = kept_states(train)
    for policy, plan in plans.items():
        plans[policy] = with_gathers(replace(plan, memory_events=events, optimizer_states=states))
    search = PolicySearch(plans, int(params.memory_budget_gib * 2**30), train)
    units = search.best_units()
    why = (
        f"AUTO: {_summary(units)}; a rank holds at most {size(search.memory(units))} of {size(search.budget)} and "
        f"sends {size(search.traffic(units))} a step, with all SHARD {size(search.traffic(search.shard.units))}"
    )
    return replace(search.shard, units=units, why=why, memory_events=())


class PolicySearch:
    """Search the mixes of all policies for the one that sends least and fits a memory budget.

    This is a knapsack problem. Layers repeat, and a knapsack of equal things is solved by sorting: the greedy choice by
    bytes saved per byte of memory added (Dantzig 1957). On the presets what it sends is within 1 % of the best mix.
    """

    def __init__(self, plans: Mapping[FrozenPolicy, WrapPlan], budget: int, train: TrainParams) -> None:
        """plans: by the policy of all frozen units, SHARD among them. budget: bytes of a rank."""
        self.plans = plans
        self.shard = plans[FrozenPolicy.SHARD]
        self.budget = budget
        self.train = train
        self.bytes_of_units = UnitBytesTable(self.shard)
        self.sent: dict[int, int] = {}
        """Bytes that a rank sends for a unit in a step, by the unit's id; the units are those of the plans."""
        timeline = step_timeline(self.shard, train)
        self.most_held = timeline.most_while_gathered if timeline else {}

    def memory(self, units: tuple[Unit, ...]) -> int:
        """Return the most bytes that a rank holds in a step."""
        return self._walked(units, limit=None)

    def traffic(self, units: tuple[Unit, ...]) -> int:
        """Return the bytes that a rank sends for these units in a step."""
        total = 0
        for unit in units:
            sent = self.sent.get(id(unit))
            if sent is None:
                sent = self.sent[id(unit)] = self.shard.wire_bytes(unit, self.train.accumulation)
            total += sent
        return total

    def fits(self, units: tuple[Unit, ...]) -> bool:
        """Return whether the budget is enough for these units."""
        return self._walked(units, limit=self.budget) <= self.budget

    def _walked(self, units: tuple[Unit, ...], *, limit: int | None) -> int:
        """Return the most bytes that a rank holds, up to the first event at which it holds more than the limit."""
        plan = replace(self.shard, units=units)
        return step_walk(plan, self.train, table=self.bytes_of_units, limit=limit).peak_bytes

    def best_units(self) -> tuple[Unit, ...]:
        """Return the best mix found. Raises ParamError if none fits."""
        mixes = []
        for units in (*(plan.units for plan in self.plans.values()), self.shard_until_it_fits()):
            if self.fits(units):
                mixes.append(self.improve(units, by_density=True))
                # Where units differ much in size, large ones first may fill the budget better.
                mixes.append(self.improve(units, by_density=False))
        if not mixes:
            least = min(self.memory(plan.units) for plan in self.plans.values())
            raise ParamError(
                "memory_budget_gib",
                f"{self.budget / 2**30:.3g} is {size(least - self.budget)} too little: with one policy for all frozen "
                f"units a rank holds at least {size(least)}; set it to {least / 2**30 + 5e-4:.3f}, shard over more "
                "ranks, or lower frozen_dtype",
            )
        return min(mixes, key=self.traffic)

    def shard_until_it_fits(self) -> tuple[Unit, ...]:
        """Replicate all frozen units, then shard one by one, those first that send least for each byte freed.

        Of several sharded units, replicating one adds memory; replicating all also frees what they are gathered into.
        Changes of one unit do not find that, so the search also starts here.
        """
        replicate = self.plans[FrozenPolicy.REPLICATE]
        units, before = replicate.units, self.memory(replicate.units)
        changes = []
        for index, unit in enumerate(self.shard.units):
            freed = before - self.memory(changed(units, index, unit))
            sent_per_byte_freed = self.traffic((unit,)) / max(1, freed)
            changes.append((sent_per_byte_freed, index, unit))
        changes.reverse()  # of equal units, the ones that run last are sharded first: sorting keeps their order
        changes.sort(key=lambda change: change[0])
        for _, index, unit in changes:
            if self.fits(units):
                break
            units = changed(units, index, unit)
        return units

    def improve(self, units: tuple[Unit, ...], *, by_density: bool) -> tuple[Unit, ...]:
        """Take the changes of one unit that save traffic and fit.

        by_density: begin with those that save most bytes per byte of memory added, else with those that save most.
        """
        before = self.memory(units)
        changes = []
        for plan in self.plans.values():
            for index, unit in enumerate(plan.units):
                saved: float = self.traffic((units[index],)) - self.traffic((unit,))
                if saved > 0 and by_density:
                    saved /= max(1, self.memory(changed(units, index, unit)) - before)
                # Of equal units those first that are gathered when a rank holds most: replicated, they no longer are.
                changes.append((saved, self.most_held.get(index, 0), index, unit))
        changes.sort(key=lambda change: change[:2], reverse=True)
        for _, _, index, unit in changes:
            mix = changed(units, index, unit)
            # Not all save traffic, an earlier change may have given the unit a better policy or used up the budget.
            if self.traffic(mix) < self.traffic(units) and self.fits(mix):
                units = mix
        return units


def changed(units: tuple[Unit, ...], index: int, unit: Unit) -> tuple[Unit, ...]:
    """Return the units with another one in the place of one."""
    return (*units[:index], unit, *units[index + 1 :])


def _summary(units: tuple[Unit, ...]) -> str:
    """Return how many frozen units got which policy."""
    policies = [unit.frozen_policy for unit in units if unit.frozen_policy]
    parts = [f"{policy} {policies.count(policy)}" for policy in sorted(set(policies))]
    return f"{', '.join(parts) or 'no'} frozen units"
