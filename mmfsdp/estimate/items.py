"""estimate: the cost of a plan on each rank, item by item: memory and wire bytes."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core.plan import WrapPlan, size
from ..params import TrainParams
from .wire import CollectiveCount, collectives

if TYPE_CHECKING:
    from .memory import Memory


@dataclass(frozen=True)
class Estimate:
    """The cost of a plan on each rank, itemized."""

    memory: Memory
    """Without activations."""
    wire: tuple[CollectiveCount, ...]
    peak: Memory | None = None
    """At the peak of a step, activations included; None for a plan made without an example."""
    host: Memory | None = None
    """The part of `memory` that lies in CPU memory with `cpu_offload`; the peak is then the device's."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank holds in a step."""
        return self.peak.bytes if self.peak else None

    @property
    def peak_when(self) -> str:
        """The phase and unit of the peak."""
        return self.peak.when if self.peak else ""

    @property
    def memory_bytes(self) -> int:
        """Parameters, gathered units, gradients, optimizer states and buffers; activations come on top."""
        return self.memory.bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in one optimizer step."""
        return sum(w.wire_bytes for w in self.wire)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, totals included."""
        values = asdict(self)
        for name in ("memory_bytes", "wire_bytes", "peak_bytes", "peak_when"):
            values[name] = getattr(self, name)
        return values

    def __str__(self) -> str:
        lines = [f"memory of a rank, activations apart: {size(self.memory_bytes)}", *_items(self.memory)]
        if self.host:
            offloaded, on_device = size(self.host.bytes), size(self.memory_bytes - self.host.bytes)
            lines += [f"of it offloaded to the host: {offloaded}; on the device {on_device}", *_items(self.host)]
        if self.peak:
            lines += [f"peak of a rank: {size(self.peak.bytes)}, in {self.peak_when}", *_items(self.peak)]
        lines.append(f"a rank sends in an optimizer step: {size(self.wire_bytes)} ({self.wire_bytes:,} bytes)")
        for w in self.wire:
            lines.append(f"  {w.kind:<14} {w.phase:<8} {w.count:>6} x, {size(w.wire_bytes):>9} sent")
        return "\n".join(lines)


def estimate(plan: WrapPlan, train: TrainParams | None = None, *, sources: int = 1) -> Estimate:
    """Return what each rank will hold and send in one optimizer step of `train.accumulation` micro-steps.

    sources: of data; each has a batch of its own in each micro-step, and its loss is summed over ranks by itself.
    """
    from .memory import memory_at_rest, memory_on_host, step_walk  # imports torch

    train = train or TrainParams()
    return Estimate(
        memory=memory_at_rest(plan),
        wire=collectives(plan, train, sources),
        peak=step_walk(plan, train, sources=sources).peak if plan.memory_events else None,
        host=memory_on_host(plan, train),
    )


def _items(memory: Memory) -> list[str]:
    """Return lines with each item that is not 0."""
    items = [f"{name} {size(value)}" for name, value in asdict(memory).items() if value and name != "when"]
    return textwrap.wrap(", ".join(items), 116, initial_indent="  ", subsequent_indent="  ")
