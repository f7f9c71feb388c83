"""Predict the time of a step on a machine, and what bounds it: compute, memory or network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log2

from ..core.plan import ITEMSIZE, WrapPlan
from ..params import Backend, ParamError, TrainParams
from .wire import CollectiveCount, collectives

WORKSPACE = 96 << 20
"""Bytes that cuBLAS takes from torch's allocator for its own use, and the prediction lacks: on Hopper torch gives each
handle 32 MiB (CUDABlas.cpp), and forward, backward and cublasLt may have one each. Other GPUs take less."""


@dataclass(frozen=True)
class Machine:
    """The hardware of the ranks and their network; peak figures of data sheets, or measured ones."""

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
    fp32: float = 0.0
    """Per second and rank, where most of a model computes in fp32; 0: `flops`."""
    context: float = 0.0
    """Bytes of a GPU that torch's allocator does not see: CUDA's context and kernels, NCCL's buffers."""
    fragmentation: float = 0.0
    """Share of the peak that the allocator reserves beyond it: gaps, and blocks that are larger than what is asked."""
    name: str = "given"

    def needed_bytes(self, peak: int) -> int:
        """Return the bytes that must be free on a GPU for a peak of so many in tensors."""
        workspace = WORKSPACE if self.context else 0
        return int((peak + workspace) * (1 + self.fragmentation) + self.context)


CONTEXT, FRAGMENTATION = 1.5e9, 0.15
"""What a GPU needs beyond the tensors' peak. NCCL took 0.5 to 0.7 GB for a group of 2 to 4 ranks (NVIDIA/nccl, issue
964), CUDA's context takes some 0.5 GB. Published runs reserved 12 to 24 % more than they allocated, without
expandable segments (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md)."""

_MACHINES = (
    Machine(989e12, 3.35e12, 450e9, fp32=67e12, name="h100-nvlink"),
    Machine(989e12, 3.35e12, 50e9, 3e-5, inside=450e9, fp32=67e12, name="h100-infiniband"),
    Machine(312e12, 2.0e12, 300e9, fp32=19.5e12, name="a100-nvlink"),
    Machine(312e12, 2.0e12, 25e9, 3e-5, inside=300e9, fp32=19.5e12, name="a100-infiniband"),
    Machine(312e12, 2.0e12, 3.1e9, 1e-4, inside=300e9, fp32=19.5e12, name="a100-ethernet"),
    Machine(165e12, 1.0e12, 25e9, 3e-5, capacity=24e9, fp32=82.6e12, name="rtx4090-pcie"),
)
MACHINES = {m.name: replace(m, context=CONTEXT, fragmentation=FRAGMENTATION) for m in _MACHINES}
"""GPUs (bf16; fp32 without TensorFloat-32, as is torch's default) and networks by name: NVLink within a node, a card of
400 (H100) or 200 Gb/s InfiniBand per GPU, 25 Gb/s Ethernet per GPU. No CPU is among them: its small operators take as
long to call as to run, and a prediction from rates was off by 3 to 5 times."""

OPTIMIZER_PASSES = 7
"""AdamW reads weights, gradients and two moments, and writes all but the gradients."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    """Of operations, and of dequantizing frozen matrices that rest in 8 or 4 bits."""
    memory: float
    """To read the weights, as often as they are computed with, and the optimizer's states."""
    network: float
    overlapped: float
    """If all-gathers and reductions run beside compute, but for those of the first unit."""
    inside: int = 0
    """Bytes that a rank sends to others of its node."""
    between: int = 0
    """Bytes that it sends to other nodes."""
    machine: str = ""

    @property
    def serial(self) -> float:
        """If no collective runs beside compute."""
        return max(self.compute, self.memory) + self.network

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by the name of what takes them."""
        return {"compute": self.compute, "memory": self.memory, "network": self.network}

    @property
    def bound(self) -> str:
        """The longest part: compute, memory or network."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds(value)}" for name, value in self.parts.items())
        times = f"{seconds(self.overlapped)}, {seconds(self.serial)} if nothing overlaps"
        return f"a step on {self.machine}: {times}\n  bound by {self.bound} ({parts})"


def machine_of(name: str, figures: Mapping[str, float] | None = None) -> Machine:
    """Return one of MACHINES, some of its figures replaced. Raises ParamError for other names."""
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
    """Return how long an optimizer step takes.

    tokens: of a micro-step on one rank, for a plan made without an example: 2 operations per parameter and token in
    forward, as many in a backward that passes through, and as many again for gradients of weights (Kaplan et al. 2020).
    Else the operations that were counted in the plan's example. machine: one of MACHINES, or its figures. Raises
    ParamError for other names, and where both tokens and example are missing.
    """
    from .memory import memory_at_rest  # imports torch

    machine = machine_of(machine) if isinstance(machine, str) else machine
    train = train or TrainParams()
    micro_steps = train.accumulation * sources
    if tokens is None and not plan.flops:
        raise ParamError("tokens", "is needed, since the plan was made without an example; give one or the other")
    operations = read_bytes = dequantized_bytes = 0
    for unit in plan.units:
        products = 1 + unit.grad_flow  # of each weight: in forward, and in a backward that passes through
        operations += 2 * (tokens or 0) * (unit.numel * products + unit.trainable_numel)
        read_bytes += unit.unsharded_bytes * products
        for p in unit.params:
            if p.weights is not None:
                # Before each product one kernel reads codes and scales, and writes the matrix in the format of compute;
                # the product reads that. A forward that runs again in backward dequantizes again.
                stored = p.numel * ITEMSIZE[unit.computed_dtype(p)]
                written = p.weights * ITEMSIZE[unit.compute_dtype or "float32"]
                dequantized_bytes += (stored + written) * (products + unit.recomputed)
                read_bytes += (written - stored) * products
    if tokens is None:
        operations = plan.flops
    rate = (machine.fp32 if plan.mostly_fp32 and machine.fp32 else machine.flops) * machine.efficiency
    compute = micro_steps * (operations / rate + dequantized_bytes / machine.memory)
    optimizer_bytes = OPTIMIZER_PASSES * memory_at_rest(plan).gradients
    memory = (read_bytes * micro_steps + optimizer_bytes) / machine.memory
    inside = between = 0
    network = 0.0
    for wire in collectives(plan, train, sources):
        within, across, duration = _sent(plan, wire, machine)
        inside, between, network = inside + within, between + across, network + duration
    local = max(compute, memory)
    # The first unit's all-gather and the last reduction have nothing to run beside.
    first = next((u for u in plan.units if u.sharded and u.params), None)
    exposed = first.unsharded_bytes + first.reduced_bytes if first else 0
    overlapped = min(local + network, max(local, network) + exposed / (machine.inside or machine.bandwidth))
    return Times(compute, memory, network, overlapped, inside, between, machine.name)


def _sent(plan: WrapPlan, wire: CollectiveCount, machine: Machine) -> tuple[int, int, float]:
    """Return (bytes within the node, bytes to other nodes, seconds) of one kind of collective.

    Shards lie within a node as far as they fit. As with NCCL, each GPU has a network card of its own, which takes an
    equal share of what leaves the node.
    """
    over_replicas = wire.kind == "all-reduce" and wire.phase == "backward" and plan.replicate > 1 and plan.shard > 1
    ranks, stride = (plan.replicate, plan.shard) if over_replicas else (plan.shard, 1)
    if plan.backend is Backend.DDP or wire.phase == "control":
        ranks = plan.world_size
    together = min(ranks, max(1, machine.gpus_per_node // stride))
    nodes = max(1, ranks // together)
    between = 0
    if nodes > 1:
        tensor = wire.wire_bytes * ranks / max(1, ranks - 1)  # the ring passes on all but one of its parts
        # Each node takes in what the others hold, once, through as many cards as it has ranks in the group.
        between = int(tensor * (nodes - 1) / nodes / together)
    inside = wire.wire_bytes - between
    duration = wire.wire_bytes / machine.bandwidth
    if machine.inside:
        duration = max(inside / machine.inside, between / machine.bandwidth)
    return inside, between, duration + wire.count * machine.latency * (1 + log2(nodes))


def seconds(n: float) -> str:
    """Return a duration in few characters."""
    return f"{n:.3g} s" if n >= 1 else f"{n * 1e3:.3g} ms"
