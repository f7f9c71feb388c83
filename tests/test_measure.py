"""Collectives are counted as they happen, whoever asks for them, and counting is cheap."""

import time

import torch
import torch.distributed as dist
from ranks import on_ranks

from mmfsdp.measure import Collectives, memory_bytes


def count_all() -> dict:
    x = torch.ones(6)
    with Collectives() as outer, Collectives() as inner:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(12), x)
        dist.all_gather([torch.empty(6), torch.empty(6)], x)
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.broadcast(x.bfloat16(), 0)
        with torch.no_grad():
            dist.all_reduce(x, async_op=True).wait()
        rows = sorted([r.kind, r.phase, r.count, r.bytes, r.wire_bytes] for r in inner.rows())
        inner.reset()
        after_reset = inner.rows()
    dist.all_reduce(x)
    return {
        "rows": rows,
        "reset": after_reset,
        "outer": outer.wire_bytes,
        "cost": cost_of_counting(),
        "sum": x.tolist(),
    }


def cost_of_counting() -> float:
    """Seconds that counting adds to one collective on this CPU, the least of several rounds."""
    x, out, n = torch.ones(1), torch.ones(2), 300

    def seconds() -> float:
        start = time.process_time()
        for _ in range(n):
            dist.all_gather_into_tensor(out, x)
        return (time.process_time() - start) / n

    plain = min(seconds() for _ in range(3))
    with Collectives():
        counted = min(seconds() for _ in range(3))
    return counted - plain


def test_kinds_bytes_and_wire_bytes():
    for found in on_ranks(count_all, 2):
        assert found["rows"] == [
            ["all-gather", "forward", 2, 96, 48],
            ["all-reduce", "control", 2, 48, 48],
            ["broadcast", "forward", 1, 12, 6],
            ["reduce-scatter", "forward", 1, 24, 12],
        ]
        assert found["reset"] == [] and found["outer"] == 114
        assert found["sum"] == [8.0] * 6
        assert found["cost"] < 2e-4  # a step of 100 ms may have 5 collectives for each per cent of it


def test_memory_is_that_of_this_process():
    before = memory_bytes(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert memory_bytes(torch.device("cpu")) >= max(before, held.numel())
