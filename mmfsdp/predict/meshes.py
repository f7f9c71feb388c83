"""Compare meshes: a plan on every split of its ranks into replicas and shards, with what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.plan import WrapPlan
from ..core.unit_rules import with_bytes
from ..params import ParamError, ShardingStrategy, TrainParams
from ..params.in_words import size
from .cost import Estimate, estimate
from .machines import Machine, machine_of
from .seconds import Times, seconds, step_time


@dataclass(frozen=True)
class Mesh:
    """A plan on `dp_replicate x dp_shard` ranks, and what it costs."""

    replicate: int
    shard: int
    cost: Estimate
    times: Times
    fits: bool
    """The peak (without an example, all but activations) is within a rank's memory."""


def meshes(
    plan: WrapPlan,
    train: TrainParams | None = None,
    *,
    machine: Machine | str,
    tokens: int | None = None,
    sources: int = 1,
) -> list[Mesh]:
    """Return the plan on every mesh of its ranks, the best first.

    The best fits, is quickest (to two digits), sends least to other nodes, holds least.

    Args:
        plan: The plan of the model, on any mesh.
        train, machine, tokens, sources: As for `step_time`.

    Returns:
        The meshes (dp_replicate, dp_shard) with at least two shards, each with its cost and seconds.

    Raises:
        ParamError: For DDP, which has no mesh to choose; for a plan with one rank along the shard axis; and as
            `step_time`.
    """
    machine = machine_of(machine) if isinstance(machine, str) else machine
    if not plan.rules.shards:
        raise ParamError("sharding_strategy", "DDP has no mesh to choose; set backend to FSDP2 and FULL_SHARD")
    if plan.shard == 1:  # the units of its mesh are not those of others: see `replicates_frozen`
        raise ParamError("dp_shard", "1 leaves a plan nothing to shard; make it with 2 or more to compare its meshes")
    choices = []
    for shard in range(2, plan.world_size + 1):  # 1 shards nothing
        if plan.world_size % shard:
            continue
        other = on_mesh(plan, plan.world_size // shard, shard)
        cost = estimate(other, train, sources=sources)
        times = step_time(other, train, machine=machine, tokens=tokens, sources=sources)
        fits = machine.needed_bytes(cost.peak_bytes or cost.memory_bytes) <= machine.capacity
        choices.append(Mesh(other.replicate, shard, cost, times, fits))

    def order(mesh: Mesh) -> tuple:
        step_s = float(f"{mesh.times.overlapped:.2g}")
        return not mesh.fits, step_s, mesh.times.between, mesh.cost.memory_bytes

    return sorted(choices, key=order)


def on_mesh(plan: WrapPlan, replicate: int, shard: int) -> WrapPlan:
    """Return the plan with the same units on other axes of the mesh, of at least two shards before and after."""
    zero2 = plan.fsdp.sharding_strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
    if replicate > 1:
        strategy = ShardingStrategy.HYBRID_SHARD_ZERO2 if zero2 else ShardingStrategy.HYBRID_SHARD
        fsdp = plan.fsdp.change(sharding_strategy=strategy, dp_replicate=replicate, dp_shard=shard)
    else:
        strategy = ShardingStrategy.SHARD_GRAD_OP if zero2 else ShardingStrategy.FULL_SHARD
        fsdp = plan.fsdp.change(sharding_strategy=strategy, dp_replicate=None, dp_shard=None)
    units = tuple(with_bytes(u, fsdp, shard) for u in plan.units)
    return replace(plan, fsdp=fsdp, world_size=replicate * shard, replicate=replicate, shard=shard, units=units)


def mesh_table(choices: list[Mesh], machine: Machine) -> str:
    """Return the meshes as text, the best first."""
    ranks = machine.gpus_per_node
    lines = [f"meshes: what a rank holds, of {size(machine.capacity)}, and sends in a step"]
    lines.append(f"within its node of {ranks:g} ranks and to other nodes")
    if machine.context or machine.fragmentation:
        lines.append("it fits with what a GPU needs beyond its tensors: " + machine.margin)
    lines.append("replicate x shard      holds     within    between     a step  bound by")
    for mesh in choices:
        times, memory = mesh.times, size(mesh.cost.peak_bytes or mesh.cost.memory_bytes)
        bound = times.bound if mesh.fits else f"{times.bound}; no fit"
        sent = f"{size(times.inside):>10} {size(times.between):>10}"
        shape = f"{mesh.replicate} x {mesh.shard}"
        lines.append(f"{shape:>17} {memory:>10} {sent} {seconds(times.overlapped):>10}  {bound}")
    best = choices[0]
    head = "best" if best.fits else "none fits; nearest"
    lines.append(f"{head}: dp_replicate {best.replicate}, dp_shard {best.shard}")
    return "\n".join(lines)
