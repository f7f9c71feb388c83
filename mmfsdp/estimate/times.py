"""How long a step takes on a machine, and what holds it: arithmetic, memory or network; and which mesh is best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log2
from typing import Any

from ..params import Backend, ParamError, ShardingStrategy, TrainParams
from ..plan import WrapPlan
from .cost import Estimate, Wire, estimate


@dataclass(frozen=True)
class Machine:
    """What ranks compute on and talk over; peak figures of data sheets, or measured ones."""

    flops: float
    """Per second and rank, in the compute format."""
    memory: float
    """Bytes per second and rank, to and from its memory."""
    bandwidth: float
    """Bytes per second that a rank sends; to other nodes, where `inside` is given."""
    latency: float = 2e-5
    """Seconds before a collective begins to move anything; as much again each time that its nodes double."""
    efficiency: float = 0.4
    """Share of `flops` that dense layers reach."""
    inside: float = 0.0
    """Bytes per second that a rank sends within its node; 0: as to other nodes."""
    gpus_per_node: int = 8
    """Ranks of a node."""
    capacity: float = 80e9
    """Bytes of memory that a rank has."""
    overhead: float = 0.0
    """Seconds that a call of an operator takes beside its work; 0 where these are issued ahead, as to a GPU."""
    fp32: float = 0.0
    """Per second and rank, where most of a model computes in fp32; 0: `flops`."""
    overlap: bool = True
    """Gathers and reductions run beside compute; false where ranks' own cores carry them, as on CPUs."""
    name: str = "given"


MACHINES = {
    m.name: m
    for m in (
        Machine(989e12, 3.35e12, 450e9, fp32=67e12, name="h100-nvlink"),
        Machine(989e12, 3.35e12, 50e9, 3e-5, inside=450e9, fp32=67e12, name="h100-infiniband"),
        Machine(312e12, 2.0e12, 300e9, fp32=19.5e12, name="a100-nvlink"),
        Machine(312e12, 2.0e12, 25e9, 3e-5, inside=300e9, fp32=19.5e12, name="a100-infiniband"),
        Machine(312e12, 2.0e12, 3.1e9, 1e-4, fp32=19.5e12, name="a100-ethernet"),
        Machine(165e12, 1.0e12, 25e9, 3e-5, capacity=24e9, fp32=82.6e12, name="rtx4090-pcie"),
        Machine(2e11, 2e10, 6e8, 1.4e-3, capacity=8e9, overhead=1.5e-5, overlap=False, name="laptop"),
    )
}
"""GPUs (bf16; fp32 without TensorFloat-32, as is torch's default) and networks by name: NVLink within a node, a card of
400 (H100) or 200 Gb/s InfiniBand per GPU, 25 Gb/s Ethernet per GPU. The laptop's are those of two ranks on two cores,
as runs measure them before they start."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    memory: float
    """To read the weights, as often as they are computed with, and the optimizer's states; with an example, what
    operators without arithmetic read and write, instead of the weights."""
    network: float
    overlapped: float
    """If gathers and reductions run beside compute, but for the first unit's gather and the last one's reduction."""
    inside: int = 0
    """Bytes that a rank sends to others of its node."""
    between: int = 0
    """Bytes that it sends to other nodes."""
    local: float = 0.0
    """What compute and memory take together."""
    machine: str = ""

    @property
    def serial(self) -> float:
        """If nothing runs beside anything."""
        return self.local + self.network

    @property
    def bound(self) -> str:
        """What holds the step: compute, memory or network."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; seconds, and by `parts`."""
        parts = {name: getattr(self, name) for name in ("compute", "memory", "network")}
        whole = {"step_s": self.overlapped, "step_s_no_overlap": self.serial, "bound": self.bound}
        return {**whole, "machine": self.machine, "parts": parts}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds(getattr(self, name))}" for name in ("compute", "memory", "network"))
        return (
            f"a step on {self.machine}: {seconds(self.overlapped)}, {seconds(self.serial)} if nothing overlaps; bound "
            f"by {self.bound} ({parts})"
        )


def machine_of(name: str, figures: Mapping[str, float] | None = None) -> Machine:
    """One of MACHINES, some of its figures replaced. Raises ParamError for other names."""
    if name not in MACHINES:
        raise ParamError("machine", f"{name!r} is not one of {', '.join(MACHINES)}; or give a Machine")
    known = [f.name for f in fields(Machine) if f.name != "name"]
    for key in figures or {}:
        if key not in known:
            raise ParamError("machine", f"{key!r} is not one of its figures, {', '.join(known)}")
    return replace(MACHINES[name], **dict(figures or {}))  # type: ignore[arg-type]


def step_time(
    plan: WrapPlan,
    train: TrainParams | None = None,
    *,
    machine: Machine | str,
    tokens: int | None = None,
    sources: int = 1,
) -> Times:
    """How long an optimizer step takes: by the work that was counted in the plan's example; or, for so many tokens, 2
    operations per parameter and token in forward, as many in a backward that passes through, and as many again for
    gradients of weights (Kaplan et al. 2020).

    tokens: of a micro-step on one rank; needed for a plan made without an example. machine: one of MACHINES, or its
    figures. Raises ParamError for other names, and where both tokens and example lack.
    """
    machine = machine_of(machine) if isinstance(machine, str) else machine
    train = train or TrainParams()
    cost = estimate(replace(plan, moments=()), train, sources=sources)
    work, bytes_ = _example(plan, machine) if tokens is None else _tokens(plan, machine, tokens)
    compute = work * train.accumulation * sources
    if tokens is None:
        compute += _OPTIMIZER_CALLS * sum(p.trainable for p in plan.params) * machine.overhead
    optimizer = _OPTIMIZER * cost.memory.gradients
    memory = (bytes_ * train.accumulation * sources + optimizer) / machine.memory
    # Operators without arithmetic run between the others; weights are read while these compute.
    local = compute + memory if tokens is None else max(compute, memory)
    moved = [_moved(plan, wire, machine) for wire in cost.wire]
    network = sum(seconds for _, _, seconds in moved)
    first = [u for u in plan.units if u.sharded and u.params][:1]
    alone = max((u.gathered_bytes + u.reduced_bytes for u in first), default=0) / (machine.inside or machine.bandwidth)
    return Times(
        compute,
        memory,
        network,
        min(max(local, network) + alone, local + network) if machine.overlap else local + network,
        inside=sum(inside for inside, _, _ in moved),
        between=sum(between for _, between, _ in moved),
        local=local,
        machine=machine.name,
    )


_OPTIMIZER = 7
"""AdamW reads weights, gradients and two moments, and writes all but the gradients."""
_OPTIMIZER_CALLS = 4
"""Of each trained tensor: its gradient is put by, its norm taken, it is clipped, and a step is made."""


def _example(plan: WrapPlan, machine: Machine) -> tuple[float, float]:
    """(seconds of arithmetic, bytes moved beside it) of the plan's example."""
    if not plan.calls:
        raise ParamError("tokens", "is needed, since the plan was made without an example; give one or the other")
    return plan.flops / _rate(plan, machine) + plan.calls * machine.overhead, plan.moved


def _tokens(plan: WrapPlan, machine: Machine, tokens: int) -> tuple[float, float]:
    """The same of so many tokens, by the units' parameters."""
    passes = sum(u.numel * (1 + u.grad_flow) + u.trainable_numel for u in plan.units)
    weights = sum(u.gathered_bytes * (1 + u.grad_flow) for u in plan.units)
    return 2 * passes * tokens / _rate(plan, machine), weights


def _rate(plan: WrapPlan, machine: Machine) -> float:
    """Operations per second, in the format of most of what is computed."""
    wide = sum(p.numel for u in plan.units for p in u.params if (u.compute_dtype or p.dtype) == "float32")
    most = 2 * wide > sum(u.numel for u in plan.units)
    return (machine.fp32 if most and machine.fp32 else machine.flops) * machine.efficiency


def _moved(plan: WrapPlan, wire: Wire, machine: Machine) -> tuple[int, int, float]:
    """(bytes within the node, bytes to others, seconds) of one kind of collective.

    Shards lie within a node as far as they fit; as NCCL does, each GPU's own card takes an equal share of what leaves.
    """
    across = wire.kind == "all-reduce" and wire.phase == "backward" and plan.replicate > 1 and plan.shard > 1
    ranks = plan.replicate if across else plan.shard
    if plan.backend is Backend.DDP or wire.phase == "control":
        ranks = plan.world_size
    together = min(ranks, max(1, machine.gpus_per_node // (plan.shard if across else 1)))
    nodes = max(1, ranks // together)
    # Each node takes in what the others hold, once, through as many cards as it has ranks in the group.
    between = int(wire.wire_bytes * (nodes - 1) / nodes / together * ranks / max(1, ranks - 1)) if nodes > 1 else 0
    inside = wire.wire_bytes - between
    seconds = max(inside / (machine.inside or machine.bandwidth), between / machine.bandwidth)
    if not machine.inside:
        seconds = wire.wire_bytes / machine.bandwidth
    return inside, between, seconds + wire.count * machine.latency * (1 + log2(nodes))


@dataclass(frozen=True)
class Mesh:
    """A plan on `dp_replicate x dp_shard` ranks, and what it costs."""

    replicate: int
    shard: int
    cost: Estimate
    times: Times
    fits: bool
    """Its peak (without an example, all but activations) is within what a rank has."""


def meshes(
    plan: WrapPlan, train: TrainParams | None = None, *, machine: Machine | str, tokens: int | None = None
) -> list[Mesh]:
    """The plan on every mesh of its ranks, the best first: what fits, is quickest (to two digits), sends least to other
    nodes, holds least. Raises ParamError for DDP."""
    machine = machine_of(machine) if isinstance(machine, str) else machine
    if plan.backend is Backend.DDP:
        raise ParamError("sharding_strategy", "DDP has no mesh to choose; set backend to FSDP2 and FULL_SHARD")
    found = []
    for shard in range(2, plan.world_size + 1):
        if plan.world_size % shard:
            continue
        other = on_mesh(plan, plan.world_size // shard, shard)
        cost = estimate(other, train)
        times = step_time(other, train, machine=machine, tokens=tokens)
        fits = (cost.peak_bytes or cost.memory_bytes) <= machine.capacity
        found.append(Mesh(other.replicate, shard, cost, times, fits))
    return sorted(
        found, key=lambda m: (not m.fits, float(f"{m.times.overlapped:.2g}"), m.times.between, m.cost.memory_bytes)
    )


def on_mesh(plan: WrapPlan, replicate: int, shard: int) -> WrapPlan:
    """The same units on other axes of the mesh."""
    from ..plan.build import with_bytes  # needs torch

    keeps = plan.fsdp.sharding_strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
    strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
    axes: dict[str, int | None] = {"dp_replicate": None, "dp_shard": None}
    if replicate > 1:
        strategy = ShardingStrategy.HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
        axes = {"dp_replicate": replicate, "dp_shard": shard}
    fsdp = replace(plan.fsdp, sharding_strategy=strategy, **axes)  # type: ignore[arg-type]
    units = tuple(with_bytes(u, fsdp, shard) for u in plan.units)
    return replace(plan, fsdp=fsdp, world_size=replicate * shard, replicate=replicate, shard=shard, units=units)


def mesh_table(found: list[Mesh], machine: Machine) -> str:
    """The meshes as text, the best first."""
    from ..plan.table import size

    titles = (
        ("replicate x shard", 18),
        ("a rank holds", 13),
        ("within nodes", 13),
        ("between nodes", 14),
        ("a step", 10),
    )
    lines = [
        f"what a rank holds, and sends in a step within its node ({machine.gpus_per_node} ranks) and to other nodes:",
        " ".join(f"{title:>{width}}" for title, width in titles) + "  bound by",
    ]
    for m in found:
        t = m.times
        held = size(m.cost.peak_bytes or m.cost.memory_bytes)
        lines.append(
            f"{f'{m.replicate} x {m.shard}':>18} {held:>13} {size(t.inside):>13} {size(t.between):>14} "
            f"{seconds(t.overlapped):>10}  {t.bound}{'' if m.fits else f', over {size(machine.capacity)}'}"
        )
    best = found[0]
    names = f"dp_replicate {best.replicate}, dp_shard {best.shard}"
    lines.append(f"best: {names}" if best.fits else f"none fits; nearest: {names}")
    return "\n".join(lines)


def seconds(n: float) -> str:
    """A duration in few characters."""
    return f"{n:.3g} s" if n >= 1 else f"{n * 1e3:.3g} ms"
