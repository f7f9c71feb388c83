"""The little that checkpoints ask of the process group, and of a process that has none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    """Ranks; 1 without a process group."""
    return dist.get_world_size() if distributed() else 1


def barrier(group: Any = None) -> None:
    """Wait for all ranks; default in the group of all."""
    if distributed():
        dist.barrier(group)


def any_rank(flags: list[bool]) -> list[bool]:
    """Each flag, true on every rank where it is on any."""
    if not distributed() or not flags:
        return flags
    tensor = torch.tensor(flags, dtype=torch.int32, device=_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def from_rank0(number: int) -> int:
    """Rank 0's number, on every rank."""
    if not distributed():
        return number
    tensor = torch.tensor([number], device=_device())
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def _device() -> torch.device:
    """Where the process group's tensors must be."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
