"""Predict the time of a step on a machine, and what bounds it: compute, memory or network.

For a plan made with an example, kernels run at the best rates that others have published for them, one after the other.
Published steps take up to SPREAD times as long, so a range is given. See notebooks/reference/published.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import log2
from typing import NamedTuple

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
    """Share of `flops` that a step reaches on the whole, where only parameters and tokens are known."""
    inside: float = 0.0
    """Bytes per second that a rank sends within its node; 0: as to other nodes."""
    gpus_per_node: int = 8
    """Ranks of a node."""
    capacity: float = 80e9
    """Bytes of memory that a rank has."""
    fp32: float = 0.0
    """Per second and rank, where most of a model computes in fp32; 0: `flops`."""
    products: float = 0.0
    """Share of `flops` that the largest matrix products reach, for a plan made with an example; 0: `efficiency`."""
    attention: float = 0.0
    """Share of `flops` that fused attention reaches; 0: `products`."""
    launch: float = 0.0
    """Seconds in which the host launches one operator: a step of many small ones takes at least that."""
    spread: float = 1.0
    """How many times as long a step may take as its kernels at their best, for a plan made with an example."""
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
    Machine(989e12, 3.35e12, 360e9, fp32=67e12, name="h100-nvlink"),
    Machine(989e12, 3.35e12, 50e9, 3e-5, inside=360e9, fp32=67e12, name="h100-infiniband"),
    Machine(312e12, 2.0e12, 210e9, fp32=19.5e12, name="a100-nvlink"),
    Machine(312e12, 2.0e12, 25e9, 3e-5, inside=210e9, fp32=19.5e12, name="a100-infiniband"),
    Machine(312e12, 2.0e12, 3.1e9, 1e-4, inside=210e9, fp32=19.5e12, name="a100-ethernet"),
    Machine(165e12, 1.0e12, 25e9, 3e-5, capacity=24e9, fp32=82.6e12, name="rtx4090-pcie"),
)
# Matrix products: the best of many shapes, 794.5 of 989 and 271.2 of 312 TFLOP/s (stas00/ml-engineering,
# compute/accelerator/README.md). Attention: FlashAttention-2, 35 % on the H100 (Shah et al. 2024, FlashAttention-3) and
# 63 to 73 % on the A100 (Dao 2023). The RTX 4090 is assumed to be as the A100.
_H100_PRODUCTS, _H100_ATTENTION = 0.80, 0.35
_A100_PRODUCTS, _A100_ATTENTION = 0.87, 0.65
LAUNCH, SPREAD = 8e-6, 1.6
"""Seconds to launch an operator in eager mode, and how many times as long as its kernels at their best a step may take:
clocks fall under load, kernels of other shapes are slower, collectives take a share of the GPU, and gaps are left."""


def _with_kernels(machine: Machine) -> Machine:
    """Return the machine with what its kernels reach and what must be free."""
    machine = replace(machine, launch=LAUNCH, spread=SPREAD, context=CONTEXT, fragmentation=FRAGMENTATION)
    if machine.name.startswith("h100"):
        return replace(machine, products=_H100_PRODUCTS, attention=_H100_ATTENTION)
    return replace(machine, products=_A100_PRODUCTS, attention=_A100_ATTENTION)


MACHINES = {machine.name: _with_kernels(machine) for machine in _MACHINES}
"""GPUs (bf16; fp32 without TensorFloat-32, as is torch's default) and networks by name: NVLink within a node at the
rate that NCCL reaches (NVIDIA/nccl-tests, issue 326: 360 GB/s of 450 on H100s; issue 149: about 200 of 300 on A100s),
a card of 400 (H100) or 200 Gb/s InfiniBand per GPU, 25 Gb/s Ethernet per GPU. No CPU is among them: its small
operators take as long to call as to run, and a prediction from rates was off by 3 to 5 times."""

OPTIMIZER_PASSES = 7
"""AdamW reads weights, gradients and two moments, and writes all but the gradients."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    """Of operations, and of dequantizing frozen matrices that rest in 8 or 4 bits."""
    memory: float
    """To read the weights, as often as they are computed with, and the optimizer's states. With an example also what
    all other operators read and write, and FSDP2's copies of what it gathers and reduces."""
    network: float
    local: float
    """Of the GPU alone: compute and memory, or what the host takes to launch the operators if that is longer."""
    overlapped: float
    """If all-gathers and reductions run beside compute, but for those of the first unit."""
    inside: int = 0
    """Bytes that a rank sends to others of its node."""
    between: int = 0
    """Bytes that it sends to other nodes."""
    machine: str = ""
    spread: float = 1.0
    """How many times as long a step may take as predicted."""

    @property
    def serial(self) -> float:
        """If no collective runs beside compute."""
        return self.local + self.network

    @property
    def slowest(self) -> float:
        """The other end of the range that begins with `overlapped`."""
        return self.spread * self.overlapped

    @property
    def expected(self) -> str:
        """The seconds of a step, or their range."""
        if self.spread == 1:
            return seconds(self.overlapped)
        return f"{seconds(self.overlapped)} to {seconds(self.slowest)}"

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
        times = f"{self.expected}; at least {seconds(self.serial)} if nothing overlaps"
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
    loads = _loads(plan, tokens)
    peak = machine.fp32 if plan.mostly_fp32 and machine.fp32 else machine.flops
    if tokens is None:
        products = machine.products or machine.efficiency
        operations = plan.hardware_flops or plan.flops  # the first is missing in plans of earlier versions
        others = operations - plan.attention_flops - plan.causal_flops
        one_micro_step = (others / products + plan.attention_flops / (machine.attention or products)) / peak
    else:
        one_micro_step = loads.operations / (peak * machine.efficiency)
    compute = micro_steps * (one_micro_step + loads.dequantized_bytes / machine.memory)
    # A product reads its weights while it computes. The other operators, copies and the optimizer come before or after.
    weights = micro_steps * loads.read_bytes / machine.memory
    moved = OPTIMIZER_PASSES * memory_at_rest(plan).gradients
    spread = 1.0
    if tokens is None:
        moved += micro_steps * plan.moved_bytes + copied_bytes(plan, micro_steps)
        spread = machine.spread
    memory = weights + moved / machine.memory
    local = max(compute, memory)  # `efficiency` has the rest
    if tokens is None:
        local = max(compute, weights) + moved / machine.memory
        local = max(local, micro_steps * plan.kernels * machine.launch)
    inside = between = 0
    network = 0.0
    for wire in collectives(plan, train, sources):
        within, across, duration = _sent(plan, wire, machine)
        inside, between, network = inside + within, between + across, network + duration
    # The first unit's all-gather and the last reduction have nothing to run beside.
    first = next((u for u in plan.units if u.sharded and u.params), None)
    exposed = first.unsharded_bytes + first.reduced_bytes if first else 0
    overlapped = min(local + network, max(local, network) + exposed / (machine.inside or machine.bandwidth))
    return Times(compute, memory, network, local, overlapped, inside, between, machine.name, spread)


class _Loads(NamedTuple):
    """Work that the weights of a plan ask for in a micro-step."""

    operations: int
    """Counted from parameters and tokens; without recomputation and attention."""
    read_bytes: int
    dequantized_bytes: int


def _loads(plan: WrapPlan, tokens: int | None) -> _Loads:
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
    return _Loads(operations, read_bytes, dequantized_bytes)


def copied_bytes(plan: WrapPlan, micro_steps: int) -> int:
    """Return what FSDP2 reads and writes to copy gathered weights out of one buffer, and gradients into one.

    FSDP1 gathers in place and DDP does not gather. The buffers are those of `_fsdp_collectives.py`.
    """
    if plan.backend is not Backend.FSDP2:
        return 0
    copied = 0
    for unit in plan.sharded_units:
        gathers = unit.gathers("forward", micro_steps) + unit.gathers("backward", micro_steps)
        copied += unit.unsharded_bytes * gathers + unit.reduced_bytes * unit.reductions(micro_steps)
    return 2 * copied


def _sent(plan: WrapPlan, wire: CollectiveCount, machine: Machine) -> tuple[int, int, float]:
    """Return (bytes within the node, bytes to other nodes, seconds) of one kind of collective.

    Shards lie within a node as far as they fit. As with NCCL, each GPU has a network card of its own, which takes an
    equal share of what leaves the node.
    """
    over_replicas = wire.kind == "all-reduce" and wire.phase == "backward" and plan.replicate > 1
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
