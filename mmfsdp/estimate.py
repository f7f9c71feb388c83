"""estimate: what a plan will cost each rank in memory and on the wire. Pure functions of plain data.

Wire bytes are what one rank sends in one optimizer step, by ring algorithms: an all-gather or a reduce-scatter of a
tensor of N bytes over W ranks sends N (W-1)/W, an all-reduce twice that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .params import Backend, TrainParams
from .plan import Unit, WrapPlan
from .plan.cost import gather_buffer, gathered_peak, reduce_buffer, shard_bytes
from .plan.table import size

CONTROL_CALLS = 2
CONTROL_BYTES = 40
"""`train_step` agrees with the other ranks twice a step: on two float64 numbers, and on three."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    """Parameters at rest."""
    gathered: int
    """Most that gathered units take beyond that, at one time."""
    gradients: int
    """Gradients between backward and the optimizer's step."""
    optimizer: int
    """AdamW's two moments."""
    buffers: int
    """What the largest gather and the largest reduction pass through."""

    @property
    def total(self) -> int:
        """Their sum: activations come on top."""
        return self.parameters + self.gathered + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Wire:
    """One kind of collective in one optimizer step, as one rank sees it."""

    kind: str
    """all-gather, reduce-scatter or all-reduce."""
    phase: str
    """forward, backward or control."""
    count: int
    bytes: int
    """Of the whole tensors, all ranks' parts together."""
    wire_bytes: int
    """What this rank sends."""


@dataclass(frozen=True)
class Estimate:
    """What a plan costs each rank, itemized."""

    memory: Memory
    wire: tuple[Wire, ...]

    @property
    def memory_bytes(self) -> int:
        """Parameters, gathered units, gradients and optimizer states; activations come on top."""
        return self.memory.total

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends in one optimizer step."""
        return sum(w.wire_bytes for w in self.wire)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, totals included."""
        totals = {"memory_bytes": self.memory_bytes, "wire_bytes": self.wire_bytes}
        return totals | {"memory": asdict(self.memory), "wire": [asdict(w) for w in self.wire]}

    def to_json(self) -> str:
        """The estimate as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        memory = ", ".join(f"{name} {size(value)}" for name, value in asdict(self.memory).items())
        lines = [f"memory of a rank, activations apart: {size(self.memory_bytes)}", f"  {memory}"]
        lines.append(f"a rank sends in an optimizer step: {size(self.wire_bytes)} ({self.wire_bytes:,} bytes)")
        for w in self.wire:
            lines.append(f"  {w.kind:<14} {w.phase:<8} {w.count:>6} x, {size(w.wire_bytes):>9} sent")
        return "\n".join(lines)


def estimate(plan: WrapPlan, train: TrainParams | None = None) -> Estimate:
    """What each rank will hold and send in one optimizer step of `train.accumulation` micro-steps."""
    train = train or TrainParams()
    return Estimate(memory=_memory(plan), wire=tuple(w for w in _wire(plan, train.accumulation) if w.count))


def _memory(plan: WrapPlan) -> Memory:
    trained = sum(shard_bytes(plan, u) for u in plan.units)
    return Memory(
        parameters=sum(u.held_bytes for u in plan.units),
        gathered=gathered_peak(plan),
        gradients=trained,
        optimizer=2 * trained,
        buffers=max((gather_buffer(plan, u) for u in plan.units if u.sharded), default=0) + reduce_buffer(plan),
    )


def _wire(plan: WrapPlan, micro_steps: int) -> list[Wire]:
    forward = sum(_gathers(u, u.gathers_forward, micro_steps) for u in plan.units)
    backward = sum(_gathers(u, u.gathers_backward, micro_steps) for u in plan.units)
    sharded = [u for u in plan.units if u.sharded]
    control = CONTROL_CALLS if plan.world_size > 1 else 0
    return [
        _ring("all-gather", "forward", forward, _gathered(sharded, "gathers_forward", micro_steps), plan.shard),
        _ring("all-gather", "backward", backward, _gathered(sharded, "gathers_backward", micro_steps), plan.shard),
        *_reductions(plan, [u for u in sharded if u.reduced_bytes]),
        _ring("all-reduce", "control", control, CONTROL_BYTES, plan.world_size),
    ]


def _gathers(unit: Unit, each: int, micro_steps: int) -> int:
    """All-gathers of a unit in one optimizer step: one that is held is gathered in the first micro-step only."""
    return each if unit.hold else each * micro_steps


def _gathered(units: list[Unit], which: str, micro_steps: int) -> int:
    return sum(u.gathered_bytes * _gathers(u, getattr(u, which), micro_steps) for u in units)


def _reductions(plan: WrapPlan, sharded: list[Unit]) -> list[Wire]:
    """Gradients: a reduce-scatter per sharded unit, then an all-reduce over the replicas; in DDP an all-reduce."""
    if plan.backend is Backend.DDP:
        reduced = sum(u.reduced_bytes for u in plan.units)
        return [_ring("all-reduce", "backward", 1 if reduced else 0, reduced, plan.world_size)]
    total = sum(u.reduced_bytes for u in sharded)
    return [
        _ring("reduce-scatter", "backward", len(sharded), total, plan.shard),
        _ring("all-reduce", "backward", len(sharded) * (plan.replicate > 1), total // plan.shard, plan.replicate),
    ]


def _ring(kind: str, phase: str, count: int, nbytes: int, ranks: int) -> Wire:
    sent = nbytes * (ranks - 1) // ranks * (2 if kind == "all-reduce" else 1)
    alone = ranks == 1 or not count
    return Wire(kind, phase, 0 if alone else count, 0 if alone else nbytes, 0 if alone else sent)


@dataclass(frozen=True)
class Machine:
    """What ranks compute on and talk over; peak figures of data sheets, or measured ones."""

    flops: float
    """Per second and rank, in the compute format."""
    memory: float
    """Bytes per second and rank, to and from its memory."""
    bandwidth: float
    """Bytes per second that a rank sends."""
    latency: float = 2e-5
    """Seconds before a collective begins to move anything."""
    efficiency: float = 0.4
    """Share of `flops` that dense layers reach."""


MACHINES = {
    "h100-nvlink": Machine(989e12, 3.35e12, 450e9),
    "h100-infiniband": Machine(989e12, 3.35e12, 50e9, 3e-5),
    "a100-nvlink": Machine(312e12, 2.0e12, 300e9),
    "a100-ethernet": Machine(312e12, 2.0e12, 3.1e9, 1e-4),
    "rtx4090-pcie": Machine(165e12, 1.0e12, 25e9, 3e-5),
    "laptop": Machine(2e11, 4e10, 4e9, 1e-4),
}
"""GPUs (bf16) and networks by name: NVLink within a node, a 400 Gb/s InfiniBand card per GPU, 25 Gb/s Ethernet."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    memory: float
    """To read the weights, as often as they are computed with."""
    network: float
    overlapped: float
    """If gathers and reductions run beside compute, but for the first unit's gather and the last one's reduction."""

    @property
    def serial(self) -> float:
        """If nothing runs beside anything."""
        return max(self.compute, self.memory) + self.network

    @property
    def bound(self) -> str:
        """What holds the step: compute, memory or network."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


def step_time(plan: WrapPlan, train: TrainParams | None = None, *, machine: Machine | str, tokens: int) -> Times:
    """How long an optimizer step takes: 2 operations per parameter and token in forward, as many in a backward that
    passes through, and as many again for gradients of weights (Kaplan et al. 2020).

    tokens: of a micro-step on one rank. machine: one of MACHINES, or its figures. Raises ValueError for other names.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            raise ValueError(f"machine: {machine!r} is not one of {', '.join(MACHINES)}; or give a Machine")
        machine = MACHINES[machine]
    train = train or TrainParams()
    cost = estimate(plan, train)
    passes = sum(u.numel * (1 + u.grad_flow) + u.trainable_numel for u in plan.units)
    compute = 2 * passes * tokens * train.accumulation / (machine.flops * machine.efficiency)
    memory = sum(u.gathered_bytes * (1 + u.grad_flow) for u in plan.units) * train.accumulation / machine.memory
    network = cost.wire_bytes / machine.bandwidth + sum(w.count for w in cost.wire) * machine.latency
    moved = [u for u in plan.units if u.sharded and u.params]
    alone = max((u.gathered_bytes + u.reduced_bytes for u in moved[:1]), default=0) / machine.bandwidth
    return Times(compute, memory, network, max(compute, memory, network) + min(alone, network))
