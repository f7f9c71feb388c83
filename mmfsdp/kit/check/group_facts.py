"""Facts that ranks find together: whether gloo and nccl bring numbers from rank to rank, and how clocks differ."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..run.ranks.rendezvous import join_group


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


def leave_group() -> None:
    """Leave the process group, once no rank needs another one any more."""
    dist.barrier()
    dist.destroy_process_group()
