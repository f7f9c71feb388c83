"""Watch every allocation of a CPU tensor, by torch's profiler; and keep the profiler's own words from the terminal."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class CpuMemory:
    """Bytes that torch's CPU allocator held beyond what it held when watching began."""

    at_mark: int = 0
    """Bytes allocated at the call of `mark`."""
    peak: int = 0
    """The most since then."""
    marked_ns: int = 0

    def mark(self) -> None:
        """Let only what follows count for the peak."""
        self.marked_ns = time.time_ns()


@contextmanager
def cpu_memory() -> Iterator[CpuMemory]:
    """Watch every allocation of a CPU tensor, to the byte. Slow, and not while another profiler runs."""
    memory = CpuMemory()
    # Without this flag, what gloo's threads free (they are not profiled) would be counted for ever.
    c10 = ctypes.CDLL(str(next(Path(torch.__file__).with_name("lib").glob("libc10.*"))))
    flag = ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage")
    log_level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    before = flag.value, log_level.value
    flag.value, log_level.value = True, 2  # errors only: it would warn whenever older memory is freed
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with silent():
        profiler.start()
    try:
        yield memory
    finally:
        with silent():
            profiler.stop()
        flag.value, log_level.value = before
    changes = _allocations(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    if not changes:
        return
    _, total, size = changes[0]
    held_before = total - size  # the allocator's count goes on from earlier watches
    for when, total, _ in changes:
        if when < memory.marked_ns:
            memory.at_mark = total - held_before
        else:
            memory.peak = max(memory.peak, total - held_before)


def _allocations(event_tree: list[Any]) -> list[tuple[int, int, int]]:
    """Return (time, bytes held afterwards, bytes added) of each allocation and each free, in order of time."""
    changes = []
    allocation = torch._C._profiler._EventType.Allocation
    events = list(event_tree)
    while events:
        event = events.pop()
        kind, fields = event.typed  # asked once: each question goes through C++
        if kind == allocation:
            changes.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name != "c10d::_allgather_base_":
            # gloo makes a tensor as large as the output there and frees it unused (seen with torch 2.15)
            events += event.children
    return sorted(changes)


@contextmanager
def silent() -> Iterator[None]:
    """Drop what the profiler itself prints when it starts and stops: it writes to file descriptor 2."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
