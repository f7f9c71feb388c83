"""estimate: the cost of a plan on each rank, item by item: memory and wire bytes."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from ..core.plan import WITHOUT_LOSS, WrapPlan
from ..params import Device, TrainParams
from ..params.in_words import size
from .data_figures import DataFigures
from .memory import Memory, memory_at_rest, memory_on_host, step_walk
from .wire import CollectiveCount, collectives

ON_A_GPU = (
    "a GPU needs more: about 1.5 GB for CUDA's context and NCCL, 32 to 96 MiB for cuBLAS, cuDNN's workspace, and what "
    "the allocator loses to gaps, 12 to 24 % in published runs"
)


@dataclass(frozen=True)
class Estimate:
    """The cost of a plan on each rank, itemized."""

    memory: Memory
    """The most without activations: over the events of a step where the plan has them, so at most `peak`; else all
    that may be held together."""
    wire: tuple[CollectiveCount, ...]
    peak: Memory | None = None
    """At the peak of a step, activations included; None for a plan made without an example."""
    host: Memory | None = None
    """The part of `memory` that lies in CPU memory with `cpu_offload`; the peak is then the device's."""

    batch_peak: Memory | None = None
    """At the peak of a step with a batch of the run's own data; None if they were not looked at."""
    batch: str = ""
    """The batch in words; or why the data were not looked at. `peak` is of the plan's example, the longest texts."""
    batch_shapes: tuple[str, ...] = ()
    """Shapes and dtypes of its tensors."""
    data: DataFigures | None = None
    """Figures of its batches, by the sizes of the run's records; None if they were not looked at."""
    on_gpu: bool = False
    """The step may run on a GPU, which needs more memory than the tensors of the peak: see ON_A_GPU."""
    without_loss: bool = False
    """The forward of the plan's example returned no loss, so the peak is without it: see WITHOUT_LOSS."""

    @property
    def peak_bytes(self) -> int | None:
        """The most that a rank holds in a step."""
        return self.peak.bytes if self.peak else None

    @property
    def batch_peak_bytes(self) -> int | None:
        """The most that a rank holds in a step with a batch of the run's own data."""
        return self.batch_peak.bytes if self.batch_peak else None

    @property
    def peak_when(self) -> str:
        """The phase and unit of the peak."""
        return self.peak.when if self.peak else ""

    @property
    def memory_bytes(self) -> int:
        """The most without activations: parameters, gathered units, gradients, optimizer states and buffers."""
        return self.memory.bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in one optimizer step."""
        return sum(w.wire_bytes for w in self.wire)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, totals included."""
        values = asdict(self)
        for name in ("memory_bytes", "wire_bytes", "peak_bytes", "peak_when", "batch_peak_bytes"):
            values[name] = getattr(self, name)
        return values

    def __str__(self) -> str:
        lines = [f"peak memory without activations: {size(self.memory_bytes)}"]
        lines += _when(self.memory)
        lines += _items(self.memory)
        if self.host:
            offloaded, on_device = size(self.host.bytes), size(self.memory_bytes - self.host.bytes)
            lines += [f"of it offloaded to the host: {offloaded}; on the device {on_device}", *_items(self.host)]
        if self.peak:
            lines.append(f"peak memory with activations: {size(self.peak.bytes)}")
            lines += [*_when(self.peak), *_items(self.peak)]
            if self.on_gpu:
                lines += textwrap.wrap(ON_A_GPU, 80, initial_indent="  ", subsequent_indent="  ")
            if self.without_loss:
                lines += textwrap.wrap(WITHOUT_LOSS, 80, initial_indent="  ", subsequent_indent="  ")
            lines += self._of_data()
        lines.append(f"a rank sends in an optimizer step: {size(self.wire_bytes)} ({self.wire_bytes:,} bytes)")
        for w in self.wire:
            lines.append(f"  {w.kind:<14} {w.phase:<8} {w.count:>6} x, {size(w.wire_bytes):>9} sent")
        return "\n".join(lines)

    def _of_data(self) -> list[str]:
        """Return lines on the peak of a batch of the data, beside that of the longest texts, and on its batches."""
        if not self.batch:
            return []
        lines = ["  this peak is of a batch of the longest texts that data.max_length allows"]
        words = f"of a batch of the data it is not known: {self.batch}"
        if self.batch_peak:
            words = f"with {self.batch} it is {size(self.batch_peak.bytes)}"
        lines += textwrap.wrap(words, 80, initial_indent="  ", subsequent_indent="  ")
        return lines + (self.data.lines() if self.data else [])


def estimate(plan: WrapPlan, train: TrainParams | None = None, *, sources: int = 1) -> Estimate:
    """Return what each rank will hold and send in one optimizer step of `train.accumulation` micro-steps.

    Args:
        plan: A plan. Only one that was made with an example has a peak that includes activations.
        train: Micro-steps and device. Default: `TrainParams()`.
        sources: Number of data sources. Each has a batch of its own in each micro-step, and its loss is summed over
            ranks by itself.

    Returns:
        Memory by item and traffic by collective, in bytes. Print it for a table.
    """
    train = train or TrainParams()
    memory, peak, host = memory_at_rest(plan), None, memory_on_host(plan, train)
    if plan.memory_events:
        walk = step_walk(plan, train, sources=sources)
        memory, peak = walk.without_activations, walk.peak
        if host:  # the walk is the device's
            memory = memory.plus(host)
    on_gpu = train.device is not Device.CPU
    return Estimate(
        memory=memory,
        wire=collectives(plan, train, sources),
        peak=peak,
        host=host,
        on_gpu=on_gpu,
        without_loss=plan.without_loss,
    )


def _when(memory: Memory) -> list[str]:
    return textwrap.wrap(f"in {memory.when}", 80, initial_indent="  ") if memory.when else []


def _items(memory: Memory) -> list[str]:
    """Return lines of at most 80 columns with each item that is not 0."""
    items = [f"{name} {size(value)}" for name, value in asdict(memory).items() if value and name != "when"]
    return textwrap.wrap(", ".join(items), 80, initial_indent="  ", subsequent_indent="  ")
