"""What a real step held: a run's peak, watched from beside it, and a bench's, to the byte."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class PeakMemory:
    """The most that this process's tensors have held, while entered.

    A GPU counts its own. On the CPU a thread looks at what malloc has handed out, so seldom that it takes a two
    hundredth of a core: a peak of a few milliseconds may pass unseen. What is no tensor is taken off.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._most = device, 0
        self._rest: int | None = None
        """Bytes in use at the first call of `bytes` that are no tensor's."""
        self._held, self._over = _in_use(), threading.Event()

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            threading.Thread(target=self._look, daemon=True, name="memory").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def bytes(self, model: nn.Module, optimizer: Optimizer) -> int:
        """So far. Call it between steps: at the first call these two hold all tensors that there are."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        held = self._held()
        if self._rest is None:
            self._rest = held - _bytes_at_rest(model, optimizer)
        self._most = max(self._most, held)
        return self._most - self._rest

    def _look(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            began = time.thread_time()
            self._most = max(self._most, self._held())
            pause = max(0.005, 200 * (time.thread_time() - began))


def _bytes_at_rest(model: nn.Module, optimizer: Optimizer) -> int:
    """Of this rank's parameters, gradients, buffers and optimizer states; what shares storage counts once."""
    held = [t for p in model.parameters() for t in (p, p.grad)] + list(model.buffers())
    held += [t for state in optimizer.state.values() for t in state.values()]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in held if isinstance(t, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _in_use() -> Callable[[], int]:
    """What tells how many bytes malloc has handed out; where it keeps no count, how many are resident."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # not glibc
        return lambda: psutil.Process().memory_info().rss
    libc.mallinfo2.restype = _MallInfo

    def bytes_in_use() -> int:
        found = libc.mallinfo2()
        return found.hblkhd + found.uordblks

    return bytes_in_use


class _MallInfo(ctypes.Structure):
    """Of mallinfo(3): hblkhd is in large blocks, uordblks in all others."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@dataclass
class CpuMemory:
    """What torch's CPU allocator held, from when it was watched; bytes."""

    at_mark: int = 0
    """When `mark` was first called."""
    peak: int = 0
    """At most, from then on; of several marks the least: a thread of gloo's may let go of its last buffer late."""
    marks: list[int] = field(default_factory=list)

    def mark(self) -> None:
        """What follows, up to the next mark, counts for the peak."""
        self.marks.append(time.time_ns())


@contextmanager
def cpu_memory() -> Iterator[CpuMemory]:
    """Watch each CPU tensor's allocation, to the byte, and the end of those that began here. Slow: for benches."""
    found = CpuMemory()
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(_c10()), "FLAGS_caffe2_report_cpu_memory_usage")
    was, flag.value = flag.value, True  # else what gloo's threads free, last of its owners, is counted for ever
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    try:
        with silent():
            profiler.start()
        try:
            yield found
        finally:
            with silent():
                profiler.stop()
    finally:
        flag.value = was
    events = _held(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    (_, held, size), first = events[0], found.marks[0] if found.marks else 0
    before = held - size  # left over from an earlier watch
    found.at_mark = max((e[:2] for e in events if e[0] < first), default=(0, before))[1] - before
    ends = zip(found.marks or [0], [*found.marks[1:], events[-1][0] + 1], strict=True)
    found.peak = min(max((h for t, h, _ in events if a <= t < b), default=0) for a, b in ends) - before


@contextmanager
def silent() -> Iterator[None]:
    """The profiler's own chatter about starting, stopping and GPUs goes to file descriptor 2: not to people."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _c10() -> str:
    return next(str(path) for path in Path(torch.__file__).with_name("lib").glob("libc10.*"))


def _held(events: list[Any]) -> list[tuple[int, int, int]]:
    """(time, bytes held then, bytes that came) at each allocation and each end of one."""
    found, kind = [], torch._C._profiler._EventType.Allocation
    while events:
        found += [(e.start_time_ns, e.typed[1].total_allocated, e.typed[1].alloc_size) for e in events if e.tag == kind]
        events = [child for e in events for child in e.children]
    return sorted(found)
