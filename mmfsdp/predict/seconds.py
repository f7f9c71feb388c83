"""Predict the time of a step on a machine, and what bounds it: compute, memory or network.

For a plan made with an example, kernels run at the best rates that others have published for them, one after the other.
Published steps take up to SPREAD times as long, and the GPU may wait for the host before each kernel, so a range is
given, and with it the one number that measured steps were nearest to. See notebooks/reference/published.md, gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from textwrap import wrap
from typing import Any, NamedTuple

from ..core.plan import ITEMSIZE, WrapPlan
from ..params import ParamError, RunParams, TrainParams
from ..params.in_words import WIDTH
from .machines import Machine, machine_of
from .memory import memory_at_rest
from .wire import CollectiveCount, collectives


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    compute: float
    """Seconds of operations, and of dequantizing frozen matrices that rest in 8 or 4 bits."""
    memory: float
    """Seconds to read the weights, as often as they are computed with, and the optimizer's states. With an example also
    what all other operators read and write, and FSDP2's copies of what it gathers and reduces."""
    network: float
    local: float
    """Seconds of the GPU alone: compute and memory, or what the host takes to launch the operators if that is
    longer."""
    overlapped: float
    """Seconds of a step whose all-gathers and reductions overlap with compute, except the first unit's."""
    inside: int = 0
    """Bytes that a rank sends to others of its node."""
    between: int = 0
    """Bytes that it sends to other nodes."""
    machine: str = ""
    spread: float = 1.0
    """Greatest ratio of the seconds of a step to those predicted."""
    gaps: float = 0.0
    """Seconds in which a GPU may wait for the next operator to be launched."""
    eager: float = 0.0
    """The single number that measured eager steps were nearest to; 0 where none is known."""
    compiled: float = 0.0
    """The same with `compile_units`, where all operators of a unit between two products are one kernel."""
    units_compiled: bool = False
    """The plan has `compile_units`."""

    @property
    def usual(self) -> float:
        """The single number for the plan as it is; 0 where none is known."""
        return self.compiled if self.units_compiled else self.eager

    @property
    def serial(self) -> float:
        """If no collective overlaps with compute."""
        return self.local + self.network

    @property
    def slowest(self) -> float:
        """The other end of the range that begins with `overlapped`. It is never below the usual number, which adds up
        kernels and launches, where the lower end has the longer of them."""
        return max(self.spread * self.overlapped + self.gaps, self.usual)

    @property
    def expected(self) -> str:
        """The seconds of a step in words: the usual number, and the range."""
        if self.spread == 1:
            return seconds(self.overlapped)
        limits = f"{seconds(self.overlapped)} to {seconds(self.slowest)}"
        return f"about {seconds(self.usual)} ({limits})" if self.usual else limits

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
        times = f"a step on {self.machine}: {self.expected}; at least {seconds(self.serial)} if nothing overlaps"
        return "\n".join(wrap(times, WIDTH, subsequent_indent="  ")) + f"\n  bound by {self.bound} ({parts})"


def step_time(
    plan: WrapPlan,
    train: TrainParams | None = None,
    *,
    machine: Machine | str,
    tokens: int | None = None,
    sources: int = 1,
) -> Times:
    """Return how long an optimizer step takes.

    For a plan that was made with an example, the operations are those that were counted in it. Without one, `tokens`
    gives them: 2 operations per parameter and token in forward, as many in a backward that passes through, and as many
    again for gradients of weights (Kaplan et al. 2020).

    Args:
        plan: The plan of the model.
        train: The step: micro-batches, and the optimizer. Default: one micro-batch.
        machine: One of MACHINES by name, or a Machine with its figures.
        tokens: The tokens of a micro-step on one rank, for a plan without an example.
        sources: The number of data sources, each of which has micro-batches of its own.

    Returns:
        Seconds of the step and of its parts.

    Raises:
        ParamError: For a name that is not in MACHINES, or where both tokens and example are missing.
    """
    machine = machine_of(machine) if isinstance(machine, str) else machine
    train = train or TrainParams()
    micro_steps = train.accumulation * sources
    if tokens is None and not plan.flops:
        raise ParamError("tokens", "is needed, since the plan was made without an example; give one or the other")
    loads = _loads(plan, tokens)
    peak = machine.fp32 if plan.mostly_fp32 and machine.fp32 else machine.flops
    if tokens is None:
        products = machine.products or machine.efficiency
        others = plan.hardware_flops - plan.attention_flops - plan.causal_flops
        one_micro_step = (others / products + plan.attention_flops / (machine.attention or products)) / peak
    else:
        one_micro_step = loads.operations / (peak * machine.efficiency)
    compute = micro_steps * (one_micro_step + loads.dequantized_bytes / machine.memory)
    # A product reads its weights while it computes. The other operators, copies and the optimizer come before or after.
    weights = micro_steps * loads.read_bytes / machine.memory
    # The norm reads the gradients. The optimizer reads weights, gradients and states, and writes all but the gradients,
    # which it writes, too, where it clips them: with AdamW's two moments 9 in all.
    clips = train.max_grad_norm is not None
    moved = (4 + clips + 2 * plan.optimizer_states) * memory_at_rest(plan).gradients
    spread, gaps = 1.0, 0.0
    if tokens is None:
        moved += micro_steps * plan.moved_bytes + copied_bytes(plan, micro_steps)
        spread, gaps = machine.spread, micro_steps * _launches(plan) * machine.launch
    moved_s = moved / machine.memory
    local = max(compute, weights + moved_s)  # `efficiency` has the rest
    if tokens is None:
        local = max(max(compute, weights) + moved_s, gaps)
    inside = between = 0
    network = 0.0
    for wire in collectives(plan, train, sources):
        within, across, duration = wire_time(plan, wire, machine)
        inside, between, network = inside + within, between + across, network + duration
    # The first unit's all-gather and the last reduction have nothing to overlap with.
    first = next((u for u in plan.units if u.sharded and u.params), None)
    exposed = first.unsharded_bytes + first.reduced_bytes if first else 0
    exposed_s = exposed / (machine.inside or machine.bandwidth)

    def beside_network(local_s: float) -> float:
        return min(local_s + network, max(local_s, network) + exposed_s)

    eager = compiled = 0.0
    if tokens is None and machine.operator:
        one_by_one, fused = _usual_local(plan, machine, micro_steps, products_s=max(compute, weights), moved_s=moved_s)
        eager, compiled = beside_network(one_by_one), beside_network(fused)
    of_gpu = compute, weights + moved_s, network, local, beside_network(local)
    usual = eager, compiled, plan.fsdp.compile_units
    return Times(*of_gpu, inside, between, machine.name, spread, gaps, *usual)


def _launches(plan: WrapPlan) -> int:
    """Return the kernels that the host launches in a micro-step: in compiled units one for those that are fused."""
    return plan.kernels - plan.fusable_kernels if plan.fsdp.compile_units else plan.kernels


def _usual_local(
    plan: WrapPlan, machine: Machine, micro_steps: int, *, products_s: float, moved_s: float
) -> tuple[float, float]:
    """Return the usual seconds of the GPU alone, with each operator by itself and with those of units fused."""
    eager = machine.products_factor * products_s + machine.bytes_factor * moved_s
    eager += machine.operator * micro_steps * plan.kernels
    saved_s = machine.bytes_factor * plan.fusable_bytes / machine.memory + machine.operator * plan.fusable_kernels
    return eager, eager - micro_steps * saved_s


def workload(plan: WrapPlan, params: RunParams) -> dict[str, Any]:
    """Return what `step_time` and `meshes` take of a run: train, sources and tokens, so that all who ask agree.

    Without an example a micro-step is counted as batch_size texts of the greatest length.
    """
    tokens = None if plan.flops else params.train.batch_size * params.data.max_length
    return {"train": params.train, "sources": len(params.data.sources()), "tokens": tokens}


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
            if p.num_weights is not None:
                # Before each product one kernel reads codes and scales, and writes the matrix in the format of compute;
                # the product reads that. A forward that runs again in backward dequantizes again.
                stored = p.numel * ITEMSIZE[unit.computed_dtype(p)]
                written = p.num_weights * ITEMSIZE[unit.compute_dtype or "float32"]
                dequantized_bytes += (stored + written) * (products + unit.recomputed)
                read_bytes += (written - stored) * products
    return _Loads(operations, read_bytes, dequantized_bytes)


def copied_bytes(plan: WrapPlan, micro_steps: int) -> int:
    """Return what FSDP2 reads and writes to copy gathered weights out of one buffer, and gradients into one.

    FSDP1 gathers in place and DDP does not gather. See torch's `_fsdp_collectives.py` for the buffers.
    """
    if not plan.rules.by_parameter:
        return 0
    copied = 0
    for unit in plan.sharded_units:
        gathers = unit.gathers("forward", micro_steps) + unit.gathers("backward", micro_steps)
        copied += unit.unsharded_bytes * gathers + unit.reduced_bytes * unit.reductions(micro_steps)
    return 2 * copied


def wire_time(plan: WrapPlan, wire: CollectiveCount, machine: Machine) -> tuple[int, int, float]:
    """Return (bytes within the node, bytes to other nodes, seconds) of one kind of collective."""
    over_replicas = wire.kind == "all-reduce" and wire.phase == "backward" and plan.replicate > 1
    ranks, stride = (plan.replicate, plan.shard) if over_replicas else (plan.shard, 1)
    if not plan.rules.shards or wire.phase == "control":
        ranks = plan.world_size
    return ring_time(machine, wire.wire_bytes, ranks, stride=stride, count=wire.count)


def ring_time(
    machine: Machine, wire_bytes: int, ranks: int, *, stride: int = 1, count: int = 1
) -> tuple[int, int, float]:
    """Return (bytes within the node, bytes to other nodes, seconds) of collectives in which a rank sends so many bytes.

    Shards lie within a node as far as they fit. As with NCCL, each GPU has a network card of its own, which takes an
    equal share of what leaves the node.

    Args:
        machine: The ranks' hardware and network.
        wire_bytes: Bytes that a rank sends in all of the collectives together.
        ranks: The number of ranks in the group.
        stride: The difference between the numbers of two neighbors in the group: 1 for shards, dp_shard for replicas.
        count: The number of collectives, each of which has a latency.
    """
    together = min(ranks, max(1, machine.gpus_per_node // stride))
    nodes = max(1, ranks // together)
    between = 0
    if nodes > 1:
        tensor = wire_bytes * ranks / max(1, ranks - 1)  # the ring passes on all but one of its parts
        # Each node takes in what the others hold, once, through as many cards as it has ranks in the group.
        between = int(tensor * (nodes - 1) / nodes / together)
    inside = wire_bytes - between
    duration = wire_bytes / machine.bandwidth
    if machine.inside:
        duration = max(inside / machine.inside, between / machine.bandwidth)
    return inside, between, duration + count * machine.latency * (1 + log2(nodes))


def seconds(n: float) -> str:
    """Return a duration in few characters."""
    return f"{n:.3g} s" if n >= 1 else f"{n * 1e3:.3g} ms"
