"""Measure ways to wrap the model, one at a time: rate, memory, exposed communication, with predictions beside them."""

from __future__ import annotations

import time
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.bench.bench_models import (
    CORNSTARCH,
    IN_HEAD,
    OPENFLAMINGO,
    OURS,
    Method,
    copy_to,
    measure_step,
    time_step,
    wrap_as,
)
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.train.cpu_memory import silent
from mmfsdp.kit.train.profile import summary, work_events
from tests.bench.gpu.device import DEVICE, ON_GPU, matrix_rate, synchronize
from tests.bench.gpu.flamingo import batch_of, plan_of, predicted, pristine, wrap
from tests.bench.gpu.rows import Rows

SHARD = "frozen-aware SHARD"
ORDER = (SHARD, OPENFLAMINGO, *IN_HEAD, "frozen-aware REPLICATE", CORNSTARCH, "DDP")
"""Without KEEP: on one rank it is the same plan as REPLICATE, and SHARD differs from them in what trains only."""
ROUNDS = 8 if ON_GPU else 1
AT_ONCE = 5 if ON_GPU else 2
"""Steps that are issued in one go: a single one pays for the host's start."""
ROW_SECONDS = 18 if ON_GPU else 0
"""Time that a row may take: none is begun later."""


def methods(rows: Rows) -> None:
    """Write a row for each way at one size of batch; two with a mask; then the first at larger ones while memory lasts.

    The size is one that OpenFlamingo's scheme, which holds most, has memory for.
    """
    samples = base_samples()
    # The first way again at the end: the difference is the drift of the clock.
    cases = [(way, samples, False) for way in (*ORDER, SHARD)] + [(way, samples, True) for way in (SHARD, OPENFLAMINGO)]
    if not ON_GPU:
        cases = [case for case in cases if case[0] in (SHARD, OPENFLAMINGO) and not case[2]]
    for way, size, mask in cases:
        measure_way(rows, way, size, mask)
    while ON_GPU and rows.seconds_left > ROW_SECONDS:
        samples *= 2
        # With whole logits, and with the loss in the head, which needs less memory.
        fits = [measure_way(rows, way, samples, False) for way in (SHARD, *IN_HEAD)]
        if not any(fits):
            break


def base_samples() -> int:
    """Return how many samples of 512 tokens to begin with: 16 on a GPU of 80 GB."""
    if not ON_GPU:
        return 2
    gigabytes = torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
    return max(1, min(16, int(gigabytes / 5)))


def measure_way(rows: Rows, way: str, samples: int, mask: bool) -> bool:
    """Write the row of a way, if there is time. Returns False if there is not, or too little memory."""
    if rows.seconds_left < ROW_SECONDS:
        return False
    return rows.attempt({"way": way, "samples": samples, "mask": mask}, partial(row_of, way, samples, mask))


def row_of(way: str, samples: int, mask: bool) -> dict[str, Any]:
    """Return what a step of a way does and holds."""
    batch = batch_of(samples, mask=mask)

    def make(_: str) -> Method:
        if way in OURS:
            return wrap(pristine(), plan_for(way, samples, mask))
        return wrap_as(way, copy_to(pristine(), DEVICE), batch.inputs(), device=DEVICE)

    method, memory = measure_step(way, make, batch, DEVICE)
    times = [time_step(method, batch, DEVICE) for _ in range(ROUNDS)]
    seconds = median(times)
    # Each way needs the FLOPs of the same plan, whatever else it computes.
    row = {"s": seconds, "samples/s": samples / seconds} | shares(plan_for(SHARD, samples, mask), seconds)
    row |= {"least s": min(times), "most s": max(times), "s of steps in one go": seconds_at_once(method, batch)}
    row["peak GB"] = memory["peak_bytes"] / 1e9
    if ON_GPU:
        row["reserved GB"] = memory["reserved_bytes"] / 1e9
        free, total = torch.cuda.mem_get_info(DEVICE)
        row["in use GB"] = (total - free) / 1e9  # with what the allocator does not see, such as CUDA's context
    row |= communication(method, batch)
    if way in OURS:
        row |= predicted(plan_for(way, samples, mask), peak=memory["peak_bytes"], seconds=seconds)
    return row


def seconds_at_once(method: Method, batch: Batch) -> float:
    """Return the seconds of a step where the host issues the next ones without waiting."""
    synchronize()
    start = time.perf_counter()
    for _ in range(AT_ONCE):
        method.step(batch, DEVICE)
    synchronize()
    return (time.perf_counter() - start) / AT_ONCE


@cache
def plan_for(way: str, samples: int, mask: bool) -> WrapPlan:
    """Return the plan of one of our ways."""
    return plan_of(pristine(), batch_of(samples, mask=mask), {"mixed_precision": "bf16", **OURS[way]})


def shares(plan: WrapPlan, seconds: float) -> dict[str, float]:
    """Return the share of the device's measured matrix rate that a step reaches on needed FLOPs, and on all."""
    return {
        "MFU": plan.flops / seconds / matrix_rate(),
        "HFU": plan.hardware_flops / seconds / matrix_rate(),
    }


def communication(method: Method, batch: Batch) -> dict[str, float]:
    """Return the seconds of a step's collectives, and of those that no compute runs beside."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if ON_GPU:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    with silent():
        profiler.start()
    method.step(batch, DEVICE)
    synchronize()
    with silent():
        profiler.stop()
    figures = summary(work_events(profiler.profiler.kineto_results.events()), steps=1)  # type: ignore[union-attr]
    return {"communication s": figures["communication_s"], "exposed s": figures["exposed_s"]}
