"""How long a step takes on a machine, and what holds it: arithmetic, memory or network."""

from __future__ import annotations

from dataclasses import dataclass

from ..params import TrainParams
from ..plan import WrapPlan
from .cost import estimate


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
