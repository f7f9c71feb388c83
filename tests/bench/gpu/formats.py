"""Measure a step with frozen matrices in int8 and nf4 beside bf16, at 4,096 tokens on the GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from mmfsdp.kit.bench.bench_models import measure_alone
from tests.bench.gpu.device import DEVICE, ON_GPU, SHARDS_INTEGERS
from tests.bench.gpu.flamingo import batch_of, plan_of, predicted, pristine, quantized, run_params, wrap
from tests.bench.gpu.rows import Rows

SAMPLES = 8 if ON_GPU else 2
"""Of 512 tokens each."""
ROUNDS = 5 if ON_GPU else 1


def formats(rows: Rows) -> None:
    """Write a row for each format that frozen matrices rest in."""
    bf16 = {"mixed_precision": "bf16", "frozen_dtype": "bf16"}
    if not SHARDS_INTEGERS:
        bf16["backend"] = "DDP"  # as the others, to be compared with them
    seconds_of_bf16 = 0.0
    forms = {"bf16": bf16, "nf4": quantized("nf4")}
    if ON_GPU:
        forms["int8"] = quantized("int8")
    for form, fields in forms.items():
        about = {"form": form, "tokens": SAMPLES * run_params().data.max_length}

        def measured(fields: dict[str, Any] = fields) -> dict[str, Any]:
            nonlocal seconds_of_bf16
            row = step_with(fields)
            seconds_of_bf16 = seconds_of_bf16 or row["s"]
            return row | {"s / bf16": row["s"] / seconds_of_bf16}

        rows.attempt(about, measured)


def step_with(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step and its peak memory, with predictions beside them."""
    batch = batch_of(SAMPLES, mask=False)
    plan = plan_of(pristine(), batch, fields)
    make = partial(wrap, pristine(), plan)
    measured = measure_alone("", lambda _: make(), batch, ROUNDS, DEVICE)
    row = {"s": measured["seconds"], "peak GB": measured["peak_bytes"] / 1e9}
    return row | predicted(plan, peak=measured["peak_bytes"], seconds=measured["seconds"])
