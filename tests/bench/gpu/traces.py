"""Write a profile of a step, and a snapshot of the memory in one."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mmfsdp.kit.train.cpu_memory import silent
from tests.bench.gpu.device import DEVICE, ON_GPU, synchronize
from tests.bench.gpu.flamingo import batch_of, plan_of, pristine, wrap
from tests.bench.gpu.rows import Rows


def traces(rows: Rows) -> None:
    """Write the row of the profile, and on a GPU of the snapshot."""
    batch = batch_of(8 if ON_GPU else 2, mask=False)
    method = wrap(pristine(), plan_of(pristine(), batch, {"mixed_precision": "bf16", "frozen_dtype": "bf16"}))

    def step() -> None:
        method.step(batch, DEVICE)
        synchronize()

    for _ in range(2):
        step()
    rows.attempt({"what": "profile"}, partial(profile, step, rows.folder / "profile.json"))
    if ON_GPU:
        rows.attempt({"what": "snapshot"}, partial(snapshot, step, rows.folder / "memory.pickle"))


def profile(step: Any, path: Path) -> dict[str, Any]:
    """Write a trace for https://ui.perfetto.dev."""
    with silent():
        with torch.profiler.profile() as profiler:
            step()
        profiler.export_chrome_trace(str(path))
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return {"file": packed.name, "MB": packed.stat().st_size / 1e6}


def snapshot(step: Any, path: Path) -> dict[str, Any]:
    """Write the allocations of a step for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        step()
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return {"file": path.name, "MB": path.stat().st_size / 1e6}
