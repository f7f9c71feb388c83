"""Run each way to wrap a small model on all GPUs: it trains, and sends and holds what was predicted."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmfsdp.core.collectives import group_device
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.bench.bench_models import copy_to
from mmfsdp.kit.spawn_ranks import on_ranks
from mmfsdp.kit.train.cpu_memory import cpu_memory
from mmfsdp.kit.train.meters import Collectives
from mmfsdp.kit.train.optimizer import build_optimizer, build_scaler
from mmfsdp.params import TrainParams
from mmfsdp.predict import estimate
from tests.bench.gpu.device import BACKEND, ON_GPU, free_memory, synchronize
from tests.bench.gpu.flamingo import TRAIN, plan_of, quantized, small_batch, small_model
from tests.bench.gpu.rows import Rows

KEEP = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
WRAPS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "FSDP2 KEEP": KEEP,
    "FSDP2 REPLICATE": {"frozen_policy": "REPLICATE"},
    "DDP": {"backend": "DDP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 KEEP": {"backend": "FSDP1", **KEEP},
    "FSDP1 REPLICATE": {"backend": "FSDP1", "frozen_policy": "REPLICATE"},
}
MORE: dict[str, dict[str, Any]] = {
    "int8": quantized("int8"),
    "nf4": quantized("nf4"),
    "recomputed": {"activation_checkpointing": "all", "mixed_precision": "bf16"},
    "offloaded": {"cpu_offload": True, "mixed_precision": "bf16"},
    "compiled": {"compile_units": True, "mixed_precision": "bf16"},
}
STEPS = 4


def works(rows: Rows) -> None:
    """Write a row for each way in bf16, and for the backends in fp16."""
    cases = {}
    for name, fields in WRAPS.items():
        cases[f"{name} bf16"] = {**fields, "mixed_precision": "bf16"}
    for backend in ("FSDP2", "DDP", "FSDP1"):
        cases[f"{backend} fp16"] = {"backend": backend, "mixed_precision": "fp16"}
    cases |= MORE
    if not ON_GPU:
        cases = {name: cases[name] for name in ("FSDP2 bf16", "offloaded")}
    gpus = torch.cuda.device_count()
    if gpus > 1:
        on_ranks(write_on_rank0, gpus, str(rows.path), cases, rows.seconds_left, method="spawn", backend=BACKEND)
        rows.failed = any("failed" in json.loads(line) for line in rows.path.read_text().splitlines())
    else:
        write_rows(rows, cases)


def write_on_rank0(path: str, cases: dict[str, dict[str, Any]], seconds: float) -> None:
    """Measure on each of several ranks; the rows are those of the first."""
    rank = dist.get_rank()
    own = Path(path) if rank == 0 else Path(path).with_suffix(f".rank{rank}")
    write_rows(Rows(own, seconds=seconds, show=rank == 0), cases)


def write_rows(rows: Rows, cases: dict[str, dict[str, Any]]) -> None:
    """Write the rows of this rank."""
    for name, fields in cases.items():
        rows.attempt({"way": name}, partial(measure_way, fields))


def measure_way(fields: dict[str, Any]) -> dict[str, Any]:
    """Train some steps, and return what the last one sends and holds, and the seconds of the first and of the others.

    The first one of compiled units compiles them.
    """
    batches = [small_batch(mask=True)]
    plan = plan_of(small_model(), batches[0], fields)
    device = group_device()
    free_memory()
    losses: list[float] = []
    seconds: list[float] = []
    sent = 0

    def steps(mark: Any) -> None:
        nonlocal sent
        model = apply_plan(copy_to(small_model(), device), plan, device=device)
        optimizer, _ = build_optimizer(model, TrainParams())
        scaler = build_scaler(model)
        for number in range(STEPS):
            if number == STEPS - 1:  # AdamW's states exist then, and DDP has made its buckets anew
                mark()
            start = time.perf_counter()
            with Collectives() as collectives:
                losses.append(train_step(model, batches, optimizer, max_grad_norm=1.0, scaler=scaler).loss)
                sent = collectives.wire_bytes
            seconds.append(time.perf_counter() - start)  # the loss was read, so the GPU is done

    if ON_GPU:
        # cuBLAS takes its workspace at the first product.
        torch.randn(64, 64, device=device).matmul(torch.randn(64, 64, device=device))
        before = torch.cuda.memory_allocated(device)
        steps(lambda: torch.cuda.reset_peak_memory_stats(device))
        synchronize()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with cpu_memory() as memory:
            steps(memory.mark)
        peak = memory.peak
    cost = estimate(plan, TRAIN)
    # In fp16 the first steps may overflow, and are skipped until the scale is right.
    if sent != cost.wire_bytes or losses[-1] > losses[0]:
        raise AssertionError(f"sent {sent} for {cost.wire_bytes}; losses {losses}")
    row = {"sent": sent, "peak MB": peak / 1e6, "predicted / measured": (cost.peak_bytes or 0) / peak}
    return row | {"first s": seconds[0], "s": min(seconds[1:])}
