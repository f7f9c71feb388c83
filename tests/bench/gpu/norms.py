"""Measure a step with RMS norms written out, and as one kernel each (`model.fused_norms`), in turn: A B A B."""

from __future__ import annotations

from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from mmfsdp.kit.bench.bench_models import OURS, copy_to, measure_step, time_step
from mmfsdp.kit.models.fused_norms import fuse_norms
from tests.bench.gpu.device import DEVICE, ON_GPU
from tests.bench.gpu.flamingo import batch_of, plan_of, predicted, pristine, wrap
from tests.bench.gpu.rows import Rows

FIELDS = {"mixed_precision": "bf16", **OURS["frozen-aware SHARD"]}
SAMPLES = 16 if ON_GPU else 2
TURNS = 2 if ON_GPU else 1
ROUNDS = 8 if ON_GPU else 1


def norms(rows: Rows) -> None:
    """Write a row for each turn of each of the two."""
    for turn in range(TURNS):
        for fused in (False, True):
            if rows.seconds_left > (8 if ON_GPU else 0):
                rows.attempt({"fused norms": fused, "turn": turn}, partial(row_of, fused))


@cache
def model_with(fused: bool) -> nn.Module:
    """Return the model, or a copy with fused norms, in main memory."""
    if not fused:
        return pristine()
    model = copy_to(pristine(), torch.device("cpu"))
    fuse_norms(model)
    return model


def row_of(fused: bool) -> dict[str, Any]:
    """Return the seconds and the peak of a step."""
    batch, model = batch_of(SAMPLES, mask=False), model_with(fused)
    plan = plan_of(model, batch, FIELDS)
    method, memory = measure_step("norms", lambda _: wrap(model, plan), batch, DEVICE)
    seconds = [time_step(method, batch, DEVICE) for _ in range(ROUNDS)]
    row = {"s": median(seconds), "least s": min(seconds), "most s": max(seconds), "operators": plan.kernels}
    row |= {"moved GB": plan.moved_bytes / 1e9, "peak GB": memory["peak_bytes"] / 1e9}
    return row | predicted(plan, peak=memory["peak_bytes"], seconds=median(seconds))
