"""Facts that ranks find together: whether gloo and nccl bring numbers from rank to rank, how clocks differ, and the
bandwidth between ranks, measured with the two collectives of FSDP, of which machine_figures.py makes figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..run.ranks.address import join_group

# torch 2.14 has new names for these two, and warns of the old ones.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
CPU_SIZES, GPU_SIZES = (1 << 20, 8 << 20, 32 << 20), (8 << 20, 64 << 20, 256 << 20)
"""Bytes of the full tensor: of a small unit to that of a large one."""
SMALL_BYTES = 4096
"""Bytes of a tensor that is sent in no time: what it takes is the latency."""
ROUNDS = 5


def gloo_facts(timeout_s: float) -> dict[str, Any]:
    """Join all ranks by gloo, sum a number, compare the clocks. Raises what torch raises."""
    join_group("gloo", timeout_s=timeout_s)
    dist.barrier()
    now = torch.tensor([time.time()], dtype=torch.float64)
    times = [torch.empty_like(now) for _ in range(dist.get_world_size())]
    dist.all_gather(times, now)
    return {"sum": _sum(torch.device("cpu"), None), "ranks": dist.get_world_size(), "times": [float(t) for t in times]}


def nccl_facts(timeout_s: float, *, wanted: bool) -> dict[str, Any]:
    """Join all ranks by nccl, and sum a number on their GPUs. Raises what torch raises.

    Returns `skipped` with a reason where a rank has no GPU of its own.
    """
    gpus, local_ranks = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    enough = torch.tensor([wanted and gpus > 0 and dist.is_nccl_available()], dtype=torch.int64)
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    if not int(enough):
        return {"skipped": "not every rank sees a GPU" if wanted else "no rank trains on a GPU", "wanted": wanted}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_s))
    return {"sum": _sum(device, group), "ranks": dist.get_world_size(), "shared": gpus < local_ranks}


def _sum(device: torch.device, group: Any) -> float:
    """Return the sum of rank + 1 over the ranks."""
    number = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(number, group=group)
    return float(number)


def bandwidth_facts(timeout_s: float, *, on_gpus: bool) -> dict[str, Any]:
    """Measure all-gather and reduce-scatter over all ranks, and over those of a node where there are several nodes.

    Every rank must call it. Returns seconds by the bytes of the full tensor, as the slowest rank needs them.
    """
    backend, local_ranks = "nccl" if on_gpus else "gloo", int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    limit, ranks = timedelta(seconds=timeout_s), dist.get_world_size()
    everyone = dist.new_group(backend=backend, timeout=limit)
    found: dict[str, Any] = {"backend": backend, "ranks": ranks, "local_ranks": local_ranks}
    found["all"] = _measure(everyone, device, GPU_SIZES if on_gpus else CPU_SIZES)
    if 1 < local_ranks < ranks:
        for first in range(0, ranks, local_ranks):  # every rank makes the groups of all nodes
            members = list(range(first, first + local_ranks))
            group = dist.new_group(members, backend=backend, timeout=limit)
            if dist.get_rank() in members:
                own_group = group
        found["inside"] = _measure(own_group, device, GPU_SIZES if on_gpus else CPU_SIZES)
    return found


def _measure(group: Any, device: torch.device, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Return a row for each size, SMALL_BYTES first: bytes, and the seconds of each collective."""
    rows = []
    for size in (SMALL_BYTES, *sizes):
        ranks = dist.get_world_size(group)
        part = torch.ones(max(1, size // 4 // ranks), device=device)
        full = torch.empty(part.numel() * ranks, device=device)

        def gather(full: Tensor = full, part: Tensor = part) -> None:
            ALL_GATHER(full, part, group=group)

        def reduce(full: Tensor = full, part: Tensor = part) -> None:
            REDUCE_SCATTER(part, full, group=group)

        gather_s, reduce_s = _seconds(gather, device, group), _seconds(reduce, device, group)
        rows.append({"bytes": full.numel() * 4, "all_gather_s": gather_s, "reduce_scatter_s": reduce_s})
    return rows


def _seconds(work: Callable[[], object], device: torch.device, group: Any) -> float:
    """Return the seconds of a collective: the median of ROUNDS, of the slowest rank of the group."""
    durations = []
    for _ in range(1 + ROUNDS):  # the first one connects
        work()  # not timed: after it all ranks start at the same moment
        _wait(device)
        start = time.monotonic()
        work()
        _wait(device)
        durations.append(time.monotonic() - start)
    slowest = torch.tensor([median(durations[1:])], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _wait(device: torch.device) -> None:
    """Wait for the GPU, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def leave_group() -> None:
    """Leave the process group, once no rank needs another one any more."""
    dist.barrier()
    dist.destroy_process_group()
