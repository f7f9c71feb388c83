"""Measure a checkpoint that is written while training goes on: does the call wait, and what stays in pinned memory."""

from __future__ import annotations

import gc
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmfsdp.checkpoint.saving import Background, save
from mmfsdp.kit.bench.bench_models import Method, flamingo_batch, model_params, random_model
from tests.bench.gpu.device import DEVICE, ON_GPU, synchronize
from tests.bench.gpu.flamingo import as_loaded, plan_of, wrap
from tests.bench.gpu.rows import Rows
from tests.bench.gpu.waits import is_done_before_gpu


def saving(rows: Rows) -> None:
    """Write a row for each of three saves, the first of which finds no pinned memory; then give that memory back."""
    model = random_model(model_params(1024 if ON_GPU else 64))
    batch = as_loaded(flamingo_batch(seed=0), mask=False)
    method = wrap(model, plan_of(model, batch, {"mixed_precision": "bf16"}))
    folder, background = rows.folder / "checkpoints", Background()
    for _ in range(3):
        method.step(batch, DEVICE)
    rows.write({"what": "no save"} | pinned_memory() | {"step s": step_seconds(method, batch)})
    for number in (1, 2, 3) if ON_GPU else (1,):
        rows.attempt({"what": f"async save {number}"}, partial(save_once, number, method, batch, folder, background))
    rows.attempt({"what": "pinned memory given back"}, give_back)
    shutil.rmtree(folder, ignore_errors=True)


def save_once(number: int, method: Method, batch: Any, folder: Path, background: Background) -> dict[str, Any]:
    """Return what a save takes: of the caller, of a step while it is written, until it is complete."""
    seconds = 0.0
    start = time.perf_counter()

    def call() -> None:
        nonlocal seconds
        begin = time.perf_counter()
        save(folder, model=method.model, step=number, optimizer=method.optimizer, background=background)
        seconds = time.perf_counter() - begin

    done_before = is_done_before_gpu(call)  # the GPU is busy: the step before is not over yet
    beside = step_seconds(method, batch)
    background.settle(wait=True)
    complete = time.perf_counter() - start
    files = sum(path.stat().st_size for path in folder.glob(f"step_*{number}/**/*") if path.is_file())
    row = {"call s": seconds, "done before the GPU": done_before, "step s": beside, "complete s": complete}
    return row | {"files MB": files / 1e6} | pinned_memory()


def step_seconds(method: Method, batch: Any) -> float:
    """Return the seconds of one step."""
    synchronize()
    start = time.perf_counter()
    method.step(batch, DEVICE)
    synchronize()
    return time.perf_counter() - start


def pinned_memory() -> dict[str, float]:
    """Return the pinned memory that torch has from the driver, and the part of it that tensors use.

    It keeps what is freed, and rounds each tensor up to a power of two.
    """
    stats = torch.cuda.host_memory_stats() if ON_GPU else {}
    # Older versions of torch call these reserved and allocated bytes, newer ones allocated and active bytes.
    keys = ("allocated_bytes.current", "active_bytes.current")
    if "reserved_bytes.current" in stats:
        keys = ("reserved_bytes.current", "allocated_bytes.current")
    return {"pinned MB": stats.get(keys[0], 0) / 1e6, "pinned and used MB": stats.get(keys[1], 0) / 1e6}


def give_back() -> dict[str, Any]:
    """Return how long it takes to give pinned memory back, and what is left."""
    gc.collect()
    start = time.perf_counter()
    if ON_GPU:
        torch._C._host_emptyCache()
    return {"s": time.perf_counter() - start} | pinned_memory()
