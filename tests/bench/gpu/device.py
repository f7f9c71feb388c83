"""The device of this process, how long its work takes, and its largest rates. Imports nothing but torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
BACKEND = "nccl" if ON_GPU else "gloo"
SHARDS_INTEGERS = torch.__version__ >= "2.12"  # compares as versions do
"""FSDP2 shards int8 and uint8; before 2.12, quantized models train with DDP."""


def free_memory() -> None:
    """Give back to the driver what no tensor uses any more."""
    gc.collect()  # wrapped models are in cycles
    if ON_GPU:
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU."""
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)


def seconds_of(work: Callable[[], object], *, rounds: int = 15) -> float:
    """Return the median seconds of a call: on a GPU between two events on its own timeline."""
    for _ in range(3):
        work()
    synchronize()
    if not ON_GPU:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return median(times)
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(rounds)]
    for begin, end in zip(starts, ends, strict=True):
        begin.record()
        work()
        end.record()
    synchronize()
    return median(begin.elapsed_time(end) for begin, end in zip(starts, ends, strict=True)) / 1e3  # from milliseconds


@cache
def matrix_rate() -> float:
    """Return the FLOPs per second of the fastest product of large matrices in bf16.

    Of random numbers: a GPU draws less power for constant ones, and runs at a higher clock.
    """
    rates = [0.0]
    for width in (4096, 8192) if ON_GPU else (256,):
        a = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
        # The layouts of a linear layer: its forward, its input's gradient, its weight's.
        for left, right in ((a, b.T), (a, b), (a.T, b)):
            rates.append(2 * width**3 / seconds_of(lambda left=left, right=right: left @ right))  # type: ignore[misc]
        del a, b, left, right
        free_memory()
    return max(rates)


def copy_rate() -> float:
    """Return the bytes per second that the device's memory reads and writes."""
    source = torch.randn(2**28 if ON_GPU else 2**20, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
