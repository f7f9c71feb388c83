"""estimate: what a plan will cost each rank in memory and on the wire. Pure functions of plain data.

Wire bytes are what one rank sends in one optimizer step, by ring algorithms: an all-gather or a reduce-scatter of a
tensor of N bytes over W ranks sends N (W-1)/W, an all-reduce twice that.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..params import Backend, Device, TrainParams
from ..plan import Unit, WrapPlan
from ..plan.cost import gather_buffer, gathered_peak, gradient_bytes, reduce_buffer, reductions, shard_bytes
from ..plan.table import size
from .peak import Peak, peak_of

if TYPE_CHECKING:
    from .times import Machine, Times

CONTROL_CALLS = 2
CONTROL_BYTES = 40
"""`train_step` agrees with the other ranks twice a step: float64 numbers of label tokens and samples, then of the loss,
the gradient's norm and a wish to stop. Each data source beyond the first adds one to either."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    """Parameters at rest."""
    module_buffers: int
    """The model's own buffers."""
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
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Wire:
    """One kind of collective in one optimizer step, as one rank sees it."""

    kind: str
    """all-gather, reduce-scatter, all-reduce or broadcast."""
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
    peak: Peak | None = None
    """When a step holds most, activations included; None for a plan made without an example."""
    times: Times | None = None
    """How long a step takes; None where no machine was named."""
    host: Memory | None = None
    """Of `memory`, what lies with the host and not on the device, with `cpu_offload`; the peak is then the device's."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank holds in a step."""
        return self.peak.bytes if self.peak else None

    @property
    def peak_when(self) -> str:
        """When that is."""
        return self.peak.when if self.peak else ""

    @property
    def memory_bytes(self) -> int:
        """Parameters, gathered units, gradients and optimizer states; activations come on top."""
        return self.memory.total

    @property
    def device_bytes(self) -> int:
        """Of `memory_bytes`, what is not offloaded."""
        return self.memory.total - (self.host.total if self.host else 0)

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends in one optimizer step."""
        return sum(w.wire_bytes for w in self.wire)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, totals included."""
        totals: dict[str, Any] = {"memory_bytes": self.memory_bytes, "wire_bytes": self.wire_bytes}
        totals |= {"device_bytes": self.device_bytes, "peak_bytes": self.peak_bytes, "peak_when": self.peak_when}
        parts = {"memory": asdict(self.memory), "wire": [asdict(w) for w in self.wire]}
        items = (("host", self.host), ("peak", self.peak))
        times = self.times.to_dict() if self.times else None
        return totals | parts | {name: v and asdict(v) for name, v in items} | {"times": times}

    def to_json(self) -> str:
        """The estimate as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        memory = ", ".join(f"{name} {size(value)}" for name, value in asdict(self.memory).items())
        lines = [f"memory of a rank, activations apart: {size(self.memory_bytes)}", f"  {memory}"]
        if self.host:
            parts = {name: value for name, value in asdict(self.host).items() if value}
            lines.append(
                f"of it offloaded to the host: {size(self.host.total)}; on the device {size(self.device_bytes)}"
            )
            lines.append("  " + ", ".join(f"{name} {size(value)}" for name, value in parts.items()))
        if self.peak:
            parts = {k: v for k, v in asdict(self.peak).items() if k != "when" and v}
            lines.append(f"peak of a rank: {size(self.peak.bytes)}, in {self.peak.when}")
            lines += textwrap.wrap(", ".join(f"{k} {size(v)}" for k, v in parts.items()), 116, initial_indent="  ")
        lines.append(f"a rank sends in an optimizer step: {size(self.wire_bytes)} ({self.wire_bytes:,} bytes)")
        for w in self.wire:
            lines.append(f"  {w.kind:<14} {w.phase:<8} {w.count:>6} x, {size(w.wire_bytes):>9} sent")
        return "\n".join([*lines, *([str(self.times)] if self.times else [])])


def estimate(
    plan: WrapPlan, train: TrainParams | None = None, *, sources: int = 1, machine: Machine | str | None = None
) -> Estimate:
    """What each rank will hold and send in one optimizer step of `train.accumulation` micro-steps.

    sources: of data; each has a batch of its own in each micro-step, and its loss is summed over ranks by itself.
    machine: what the step's time is predicted for, as in `step_time`; for plans made with an example.
    """
    train = train or TrainParams()
    wire = tuple(w for w in _wire(plan, train.accumulation * sources, sources) if w.count)
    memory, host = _memory(plan), _host(plan, train)
    peak = _peak(plan, train, memory, host, sources)[0] if plan.moments else None
    cost = Estimate(memory=memory, wire=wire, peak=peak, host=host)
    if machine is None:
        return cost
    from .times import step_time  # which asks for the cost

    return replace(cost, times=step_time(plan, train, machine=machine, sources=sources))


def held(plan: WrapPlan, train: TrainParams | None = None) -> tuple[int, int]:
    """Bytes that a rank holds at most, and when forward is over: all that AUTO asks. Without moments the sum of all but
    activations stands for both."""
    train, memory = train or TrainParams(), _memory(plan)
    if not plan.moments:
        return memory.total, memory.total
    peak, turn = _peak(plan, train, memory, _host(plan, train), 1)
    return peak.bytes, turn


def _peak(plan: WrapPlan, train: TrainParams, memory: Memory, host: Memory | None, sources: int) -> tuple[Peak, int]:
    buckets = memory.gradients if plan.backend is Backend.DDP else 0
    away = host or Memory(0, 0, 0, 0, 0, 0)
    parameters, optimizer = memory.parameters - away.parameters, memory.optimizer - away.optimizer
    fixed = Peak("", parameters, memory.module_buffers, optimizer, buckets)
    micro_steps, gloo = train.accumulation * sources, train.device is Device.CPU
    return peak_of(plan, fixed, micro_steps=micro_steps, gloo=gloo, offload=host is not None)


def _host(plan: WrapPlan, train: TrainParams) -> Memory | None:
    """Shards lie with the host, with their gradients and states; what every rank holds whole stays on the device."""
    if train.device is Device.CPU or not plan.fsdp.cpu_offload:
        return None
    sharded = [u for u in plan.units if u.sharded]
    trained, gradients = (sum(part(plan, u) for u in sharded) for part in (shard_bytes, gradient_bytes))
    return Memory(sum(u.held_bytes for u in sharded), 0, 0, gradients=gradients, optimizer=2 * trained, buffers=0)


def _memory(plan: WrapPlan) -> Memory:
    trained = sum(shard_bytes(plan, u) for u in plan.units)
    return Memory(
        parameters=sum(u.held_bytes for u in plan.units),
        module_buffers=plan.buffer_bytes,
        gathered=gathered_peak(plan),
        gradients=sum(gradient_bytes(plan, u) for u in plan.units),
        optimizer=2 * trained,
        buffers=max((gather_buffer(plan, u) for u in plan.units if u.sharded), default=0) + reduce_buffer(plan),
    )


def _wire(plan: WrapPlan, micro_steps: int, sources: int) -> list[Wire]:
    forward = sum(_gathers(u, u.gathers_forward, micro_steps) for u in plan.units)
    backward = sum(_gathers(u, u.gathers_backward, micro_steps) for u in plan.units)
    sharded = [u for u in plan.units if u.sharded]
    control = CONTROL_CALLS if plan.world_size > 1 else 0
    sent = [nbytes for kind, _, nbytes in plan.beside if kind == "broadcast"]
    return [
        _ring("broadcast", "forward", len(sent), sum(sent), plan.world_size),
        _ring("all-gather", "forward", forward, _gathered(sharded, "gathers_forward", micro_steps), plan.shard),
        _ring("all-gather", "backward", backward, _gathered(sharded, "gathers_backward", micro_steps), plan.shard),
        *_reductions(plan, sharded, micro_steps),
        _ring("all-reduce", "control", control, CONTROL_BYTES + 16 * (sources - 1), plan.world_size),
    ]


def _gathers(unit: Unit, each: int, micro_steps: int) -> int:
    """All-gathers of a unit in one optimizer step: one that is held is gathered in the first micro-step only."""
    return each if unit.hold else each * micro_steps


def _gathered(units: list[Unit], which: str, micro_steps: int) -> int:
    return sum(u.gathered_bytes * _gathers(u, getattr(u, which), micro_steps) for u in units)


def _reductions(plan: WrapPlan, sharded: list[Unit], micro_steps: int) -> list[Wire]:
    """Gradients: a reduce-scatter per sharded unit, then an all-reduce over the replicas; in DDP an all-reduce."""
    if plan.backend is Backend.DDP:
        reduced = sum(u.reduced_bytes for u in plan.units)
        reduced += sum(nbytes for kind, _, nbytes in plan.beside if kind == "all-reduce")
        return [_ring("all-reduce", "backward", 1 if reduced else 0, reduced, plan.world_size)]
    count = sum(reductions(u, micro_steps) for u in sharded)
    total = sum(u.reduced_bytes * reductions(u, micro_steps) for u in sharded)
    return [
        _ring("reduce-scatter", "backward", count, total, plan.shard),
        _ring("all-reduce", "backward", count * (plan.replicate > 1), total // plan.shard, plan.replicate),
    ]


def _ring(kind: str, phase: str, count: int, nbytes: int, ranks: int) -> Wire:
    sent = nbytes * (ranks - 1) // ranks * (2 if kind == "all-reduce" else 1)
    alone = ranks == 1 or not count
    return Wire(kind, phase, 0 if alone else count, 0 if alone else nbytes, 0 if alone else sent)
