"""ways: a run planned by each way to shard it, with the cost of each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...params import Backend, Device, FrozenPolicy, ParamError, RunParams
from ...params.in_words import WIDTH, size
from ...predict import machine_of_run, step_time, workload
from ...predict.seconds import seconds
from .prepare import budget_range, previews

ONE_NODE, NODES = "h100-nvlink", "h100-infiniband"
"""Machines of the seconds where none is named: ranks of one node, and of several."""
RANKS_OF_NODE = 8


@dataclass(frozen=True)
class ShardingWay:
    """A way to shard a run, and its cost on each rank."""

    name: str
    """DDP, FSDP1, or FSDP2 with a frozen policy."""
    is_chosen: bool
    """The parameters choose it."""
    sent_bytes: int | None = None
    """Sent by a rank in an optimizer step."""
    at_rest_bytes: int | None = None
    """Weights that a rank holds between two steps."""
    peak_bytes: int | None = None
    """The most that a rank holds in a step; without activations where nobody knows the inputs."""
    seconds: float | None = None
    """Predicted seconds of a step, at best; None without GPUs."""
    machine: str = ""
    """Machine of these seconds."""
    refused: str = ""
    """The reason why this run cannot go this way; then it has no cost."""


def ways(params: RunParams, machine: str | None = None) -> Iterator[ShardingWay]:
    """Yield every way to shard a run, with its cost.

    machine: of `predict.MACHINES`, for the seconds. Default: H100s.
    """
    for name, changes in changes_of_ways(params).items():
        try:
            other = params.change(**changes)
            yield _way(name, other, is_chosen=other.fsdp == params.fsdp, machine=machine)
        except ParamError as error:
            yield ShardingWay(name, is_chosen=False, refused=error.message)


def ways_of_auto(params: RunParams, budgets: int) -> Iterator[ShardingWay]:
    """Yield what AUTO chooses within so many budgets, from the one that fits all sharded to all replicated.

    Raises ParamError where AUTO cannot be chosen, such as for inputs that nobody knows.
    """
    sharded = params.change(**changes_of_ways(params)[f"{Backend.FSDP2} {FrozenPolicy.SHARD}"])
    least, most = budget_range(sharded)
    for index in range(budgets):
        budget = (least + (most - least) * index / (budgets - 1)) / 2**30
        changes = {"fsdp.frozen_policy": FrozenPolicy.AUTO, "fsdp.memory_budget_gib": budget}
        yield _way(
            f"{Backend.FSDP2} {FrozenPolicy.AUTO}, {budget:.3g} GiB",
            sharded.change(**changes),
            is_chosen=False,
            machine=None,
        )


def changes_of_ways(params: RunParams) -> dict[str, dict[str, Any]]:
    """Return what differs from these parameters, by dotted name, for each way to shard the run."""
    choices: dict[str, dict[str, Any]] = {}
    for backend in (Backend.DDP, Backend.FSDP1):
        choices[str(backend)] = {"fsdp.backend": backend}
        if backend is not params.fsdp.backend:  # it may not know the policy of another one
            choices[str(backend)]["fsdp.frozen_policy"] = FrozenPolicy.SHARD
    for policy in FrozenPolicy:
        if policy is not FrozenPolicy.AUTO or params.fsdp.memory_budget_gib:
            choices[f"{Backend.FSDP2} {policy}"] = {"fsdp.backend": Backend.FSDP2, "fsdp.frozen_policy": policy}
    return {name: _with_defaults(params, changes) for name, changes in choices.items()}


def _with_defaults(params: RunParams, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the changes, and without AUTO those of what is only for it."""
    uses_budget = changes.get("fsdp.frozen_policy", params.fsdp.frozen_policy) is FrozenPolicy.AUTO
    if params.fsdp.memory_budget_gib is None or uses_budget:
        return changes
    return changes | {f"fsdp.{name}": value for name, value in params.fsdp.without_auto.items()}


def _way(name: str, params: RunParams, *, is_chosen: bool, machine: str | None) -> ShardingWay:
    stages = previews(params)
    plan, cost = next(stages)
    if not (plan.memory_events or plan.refused):  # the stage after that looks at the data
        plan, cost = next(stages, (plan, cost))
    if plan.refused:
        plan.check()
    machine = machine or (ONE_NODE if plan.world_size <= RANKS_OF_NODE else NODES)
    step_s = None
    if params.train.device is not Device.CPU:
        times = step_time(plan, machine=machine_of_run(machine, params), **workload(plan, params))
        step_s = times.overlapped
    return ShardingWay(
        name,
        is_chosen,
        sent_bytes=cost.wire_bytes,
        at_rest_bytes=plan.bytes_at_rest,
        peak_bytes=cost.peak_bytes or cost.memory_bytes,
        seconds=step_s,
        machine=machine if step_s is not None else "",
    )


def ways_table(compared: list[ShardingWay]) -> str:
    """Return ways as text, a line each."""
    row = "{:<18} {:>12} {:>12} {:>12} {:>12}"
    lines = ["all ways to shard it: bytes of a rank, and seconds of a step"]
    lines.append(row.format("way", "sent", "at rest", "peak", "a step"))
    for way in compared:
        name = f"{way.name} *" if way.is_chosen else way.name
        if way.sent_bytes is None or way.at_rest_bytes is None or way.peak_bytes is None:
            lines.append(textwrap.shorten(f"{name}: refused: {way.refused}", WIDTH, placeholder=" ..."))
            continue
        step = "-" if way.seconds is None else seconds(way.seconds)
        lines.append(row.format(name, size(way.sent_bytes), size(way.at_rest_bytes), size(way.peak_bytes), step))
    machines = {way.machine for way in compared if way.machine}
    note = "*: as the parameters say"
    if machines:
        note += f". a step: on {', '.join(machines)}, at best; --machine NAME chooses another"
    lines += textwrap.wrap(note, WIDTH)
    return "\n".join(lines)
