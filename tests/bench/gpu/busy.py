"""Tell what a step's seconds are: what the GPU computes, what the host takes to launch it, which kernels take most."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfsdp.kit.bench.bench_models import OURS
from mmfsdp.kit.train.cpu_memory import silent
from mmfsdp.kit.train.profile import length, union, work_events
from tests.bench.gpu.device import DEVICE, ON_GPU, free_memory, synchronize
from tests.bench.gpu.flamingo import batch_of, here, plan_of, pristine, quantized, wrap
from tests.bench.gpu.rows import Rows

DDP = {"mixed_precision": "bf16", "frozen_dtype": "bf16", "backend": "DDP"}
WAYS: dict[str, dict[str, Any]] = {
    "frozen-aware SHARD": {"mixed_precision": "bf16", **OURS["frozen-aware SHARD"]},
    "DDP": DDP,
    "nf4": quantized("nf4"),
}
SAMPLES = 16 if ON_GPU else 2
TOP = 12
"""Kernels that are named."""


def busy(rows: Rows) -> None:
    """Write a row for each way."""
    for way in WAYS if ON_GPU else ("DDP",):
        if rows.seconds_left > (10 if ON_GPU else 0):
            rows.attempt({"way": way, "samples": SAMPLES}, partial(row_of, WAYS[way]))


def row_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step, of its kernels and of the host, and the kernels that take longest."""
    batch = batch_of(SAMPLES, mask=False)
    plan = plan_of(pristine(), batch, fields)
    method = wrap(pristine(), plan)
    for _ in range(2):
        method.step(batch, DEVICE)
    walls, hosts = [], []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        method.step(batch, DEVICE)
        hosts.append(time.perf_counter() - start)
        synchronize()
        walls.append(time.perf_counter() - start)
    row = {"s": median(walls), "host s": median(hosts)} | kernels_of(method, batch)
    if ON_GPU:
        machine = here()
        operations = plan.hardware_flops - plan.attention_flops - plan.causal_flops
        row["products at best s"] = operations / machine.products / machine.flops
        row["attention at best s"] = plan.attention_flops / machine.attention / machine.flops
        row["moved at best s"] = plan.moved_bytes / machine.memory
    del method
    free_memory()
    return row | {"operators of the plan": plan.kernels}


def kernels_of(method: Any, batch: Any) -> dict[str, Any]:
    """Return what torch's profiler saw of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if ON_GPU:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with silent(), torch.profiler.profile(activities=activities) as profiler:
        method.step(batch, DEVICE)
        synchronize()
    events = work_events(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    device = "CUDA" if ON_GPU else "CPU"
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    spans = []
    for name, where, start, end in events:
        if where == device:
            spans.append((start / 1e9, end / 1e9))
            seconds[name] += end - start
            number[name] += 1
    longest = {}
    for name, nanoseconds in seconds.most_common(TOP):
        longest[name[:90]] = f"{nanoseconds / 1e6:.2f} ms in {number[name]}"
    return {"busy s": length(union(spans)), "kernels": len(spans), "longest": longest}
