"""Plan how a model will be wrapped and what that costs: `make_plan`, straight down. `wrap_fsdp` applies the plan."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..core.collectives import rank
from ..core.lint import lint
from ..core.plan import Unit, WrapPlan, size
from ..core.planner import Grouped, mesh_shape, plan_units, trace_and_group
from ..core.wrap import apply_plan
from ..params import Device, FrozenPolicy, FSDPParams, ParamError, TrainParams
from .cost_lint import lint_cost
from .memory import step_walk, with_gathers
from .memory_events import quantized_copy, record_memory, with_recording


def make_plan(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    world_size: int,
    example: dict[str, Any] | None = None,
    train: TrainParams | None = None,
) -> WrapPlan:
    """Plan how a model will be wrapped. Needs no process group and no weights: the meta device will do.

    example: keyword arguments of one forward. Tensors on the meta device will do, but for those of which the forward
    reads values, such as masks and grids of patches. With it, the order of units and the modules that backward passes
    through are traced, not assumed from the order of registration; all-gathers of modules that run several times, or
    again for activation checkpointing, are counted; AUTO needs it. train: the step that AUTO predicts, and the device
    that the lint takes into account.
    Raises ParamError for a choice that this model or world size does not allow, ValueError for an example that the
    model does not take.
    """
    params = params or FSDPParams()
    # These raise before the model is traced, which takes longest.
    mesh_shape(params, world_size)
    if params.frozen_policy is FrozenPolicy.AUTO and example is None:
        raise ParamError(
            "frozen_policy", "AUTO needs an example, of which it counts the activations; give make_plan one"
        )
    model = quantized_copy(model, params)
    # Groups depend on what is frozen and on the order of modules, not on the policy or the dtypes.
    grouped = trace_and_group(model, params, example)
    if params.frozen_policy is FrozenPolicy.AUTO and example is not None:
        plan = choose_policies(model, params, grouped, world_size, example, train or TrainParams())
    else:
        plan = plan_units(model, params, params.frozen_policy, grouped, world_size)
    device = (train or TrainParams()).device
    on_gpu = device is Device.CUDA or (device is Device.AUTO and torch.cuda.is_available())
    findings = lint(model, plan, trace=grouped.trace)
    plan = replace(plan, lint=(*findings, *lint_cost(plan, on_gpu=on_gpu)))
    if example is None or plan.refused:
        return plan
    return with_memory_events(model, plan, example)


def wrap_fsdp(
    model: nn.Module,
    params: FSDPParams | None = None,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    example: dict[str, Any] | None = None,
) -> nn.Module:
    """Plan, wrap and return the model. Every rank must call it, once the process group exists.

    See `make_plan` for `example`, `apply_plan` for the other arguments. A HYBRID strategy without sizes has them from a
    mesh of two axes, or else one replica per node, whose ranks LOCAL_WORLD_SIZE says (torchrun sets it). Rank 0 warns
    of the lint's warnings.
    """
    params = params or FSDPParams()
    if mesh is not None and mesh.ndim == 2:
        params = params.with_node_size(mesh.size(1))
    elif "LOCAL_WORLD_SIZE" in os.environ:
        params = params.with_node_size(int(os.environ["LOCAL_WORLD_SIZE"]))
    plan = make_plan(model, params, world_size=dist.get_world_size(), example=example)
    if rank() == 0 and not plan.refused:
        for finding in plan.lint:
            warnings.warn(f"plan: {finding.message}", stacklevel=2)
    return apply_plan(model, plan, device=device, mesh=mesh)


def with_memory_events(model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> WrapPlan:
    """Return the plan with the memory events and FLOPs of one micro-step, from which peak and time are predicted.

    Grouping and policies stay; all-gathers are counted, and trainable parameters without a gradient are known as
    unused. example: as for `make_plan`. Raises ValueError if the model does not take it.
    """
    return with_recording(plan, record_memory(model, plan, example))


def choose_policies(
    model: nn.Module, params: FSDPParams, grouped: Grouped, world_size: int, example: dict[str, Any], train: TrainParams
) -> WrapPlan:
    """AUTO: return the best plan found that fits `memory_budget_gib`, with a policy for each frozen unit.

    Raises ParamError if none is found.
    """
    assert params.memory_budget_gib is not None  # FSDPParams refuses AUTO without it
    policies = (FrozenPolicy.SHARD, FrozenPolicy.KEEP, FrozenPolicy.REPLICATE)
    plans = [plan_units(model, params, policy, grouped, world_size) for policy in policies]
    # A policy changes no activations, so the search needs one recording. `make_plan` records the chosen units.
    events = record_memory(model, plans[0], example).memory_events
    plans = [with_gathers(replace(plan, memory_events=events)) for plan in plans]
    search = PolicySearch(plans, int(params.memory_budget_gib * 2**30), train)
    units = search.best_units()
    why = (
        f"AUTO: {_summary(units)}; a rank holds at most {size(search.memory(units))} of {size(search.budget)} and "
        f"sends {size(search.traffic(units))} a step, with all SHARD {size(search.traffic(plans[0].units))}"
    )
    return replace(plans[0], units=units, why=why, memory_events=())


class PolicySearch:
    """Search the mixes of SHARD, KEEP and REPLICATE for the one that sends least and fits a memory budget.

    This is a knapsack problem. Layers repeat, and a knapsack of equal things is solved by sorting: the greedy choice by
    bytes saved per byte of memory added (Dantzig 1957). On the presets what it sends is within 1 % of the best mix.
    """

    def __init__(self, plans: list[WrapPlan], budget: int, train: TrainParams) -> None:
        self.plans = plans
        self.budget = budget
        self.train = train
        self.most_held = step_walk(plans[0], train).most_held

    def memory(self, units: tuple[Unit, ...]) -> int:
        """Return the most bytes that a rank holds in a step."""
        return step_walk(replace(self.plans[0], units=units), self.train).peak.bytes

    def traffic(self, units: tuple[Unit, ...]) -> int:
        """Return the bytes that a rank sends for these units in a step."""
        return sum(self.plans[0].wire_bytes(unit, self.train.accumulation) for unit in units)

    def fits(self, units: tuple[Unit, ...]) -> bool:
        """Return whether the budget is enough for these units."""
        return self.memory(units) <= self.budget

    def best_units(self) -> tuple[Unit, ...]:
        """Return the best mix found. Raises ParamError if none fits."""
        mixes = []
        for units in (*(plan.units for plan in self.plans), self.shard_until_it_fits()):
            if self.fits(units):
                mixes.append(self.improve(units, by_density=True))
                # Where units differ much in size, large ones first may fill the budget better.
                mixes.append(self.improve(units, by_density=False))
        if not mixes:
            least = min(self.memory(plan.units) for plan in self.plans)
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
        shard, _, replicate = self.plans
        units, before = replicate.units, self.memory(replicate.units)
        changes = []
        for index, unit in enumerate(shard.units):
            freed = before - self.memory(changed(units, index, unit))
            # The minus: of equal units, those that run last are sharded first.
            changes.append((self.traffic((unit,)) / max(1, freed), -index, unit))
        changes.sort(key=lambda change: change[:2])
        for _, index, unit in changes:
            if self.fits(units):
                break
            units = changed(units, -index, unit)
        return units

    def improve(self, units: tuple[Unit, ...], *, by_density: bool) -> tuple[Unit, ...]:
        """Take the changes of one unit that save traffic and fit.

        by_density: begin with those that save most bytes per byte of memory added, else with those that save most.
        """
        before = self.memory(units)
        changes = []
        for plan in self.plans:
            for index, unit in enumerate(plan.units):
                saved: float = self.traffic((units[index],)) - self.traffic((unit,))
                if saved > 0 and by_density:
                    saved /= max(1, self.memory(changed(units, index, unit)) - before)
                # Of equal units those first that are gathered when a rank holds most: replicated, they no longer are.
                changes.append((saved, self.most_held[index], index, unit))
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
