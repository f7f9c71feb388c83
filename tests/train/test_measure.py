"""Collectives are counted as they happen, and memory is watched."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from mmfsdp.kit.run.ranks.rank import set_allocator
from mmfsdp.kit.train.meters import Collectives, PeakMemory


def count_all() -> dict:
    x = torch.ones(6)
    with Collectives() as counted:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(12), x)
        dist.all_gather([torch.empty(6), torch.empty(6)], x)
        dist.reduce_scatter_tensor(torch.empty(3), x)
        dist.broadcast(x.bfloat16(), 0)
        with torch.no_grad():
            dist.all_reduce(x, async_op=True).wait()
        rows = sorted([r.kind, r.phase, r.count, r.bytes, r.wire_bytes] for r in counted.rows())
        wire_bytes = counted.wire_bytes
        counted.reset()
        after_reset = counted.rows()
    dist.all_reduce(x)
    return {"rows": rows, "reset": after_reset, "wire_bytes": wire_bytes, "sum": x.tolist()}


@pytest.mark.real
def test_kinds_bytes_and_wire_bytes():
    for found in on_ranks(count_all, 2):
        assert found["rows"] == [
            ["all-gather", "forward", 2, 96, 48],
            ["all-reduce", "control", 2, 48, 48],
            ["broadcast", "forward", 1, 12, 6],
            ["reduce-scatter", "forward", 1, 24, 12],
        ]
        assert found["reset"] == [] and found["wire_bytes"] == 114
        assert found["sum"] == [8.0] * 6


def test_memory_is_what_tensors_have_held_at_most_in_a_step(capfd):
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    weights = 4 * (1024 * 1024 + 1024)
    memory = PeakMemory(torch.device("cpu"))
    for large in (0, 64, 128):
        pictures = torch.ones(30, 3, 480, 640).byte()  # decoded in this process, between steps
        assert len(pictures) == 30
        with memory.watch_step(model, optimizer, []):
            model(torch.ones(1, 1024)).sum().backward()
            torch.ones(large, 1 << 18).sum()
            optimizer.step()
            optimizer.zero_grad()
            del pictures  # of which the allocator would warn
    assert capfd.readouterr().err == ""
    # Two moments since the first step, gradients, and 64 MiB; the third step is not watched.
    assert memory.peak_bytes == pytest.approx(4 * weights + (64 << 20), rel=0.01)


class GpuAllocator:
    """Counts as torch's allocator of GPU memory does; there is no GPU here."""

    def __init__(self):
        self.held = self.peak = self.reserved = self.reserved_peak = self.retries = 0

    def take(self, nbytes):
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        self.reserved = max(self.reserved, self.held)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def reset_peak_memory_stats(self, device):
        self.peak, self.reserved_peak = self.held, self.reserved

    def memory_stats(self, device):
        peaks = {"allocated_bytes.all.peak": self.peak, "reserved_bytes.all.peak": self.reserved_peak}
        return peaks | {"num_alloc_retries": self.retries}


def test_on_a_gpu_only_steps_count_for_the_peak(monkeypatch):
    allocator = GpuAllocator()
    for name in ("reset_peak_memory_stats", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    memory = PeakMemory(torch.device("cuda", 0))
    allocator.take(900)  # wrapping
    allocator.retries = 4
    allocator.take(-890)
    for step_bytes in (50, 70, 30):
        with memory.watch_step(nn.Linear(1, 1), None, []):
            allocator.take(step_bytes)
            allocator.take(-step_bytes)
            allocator.retries += 1
        allocator.take(500)  # held-out samples
        allocator.take(-500)
    assert memory.figures() == {"memory_bytes": 80, "reserved_bytes": 900, "alloc_retries": 3}
    assert set(PeakMemory(torch.device("cpu")).figures()) == {"memory_bytes"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_are_expandable_unless_the_person_set_the_allocators_options(name, monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    set_allocator()
    options = [os.environ.get(key) for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    assert sorted(options, key=str) == [None, "max_split_size_mb:128"]
    monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is taken back
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    set_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
