"""Ask the process group for rank, number of ranks and device; gather plain data of all ranks, and sum over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

Progress = Callable[[str], object]
"""Called with the name of a tensor before work on it. For a large model the work takes minutes, and a rank that reports
nothing for so long counts as hanging."""


def no_progress(name: str) -> None:
    """Report nothing."""


def is_distributed() -> bool:
    """Return True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def answering_ranks() -> int:
    """Return the number of ranks that take part in a collective: 1 with torch's "fake" backend, else `world_size`."""
    if is_distributed() and dist.get_backend() == "fake":
        return 1  # the other ranks only seem to be there
    return world_size()


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return what each rank passes, in order of the ranks, by a collective. Every rank must call it.

    The values travel as JSON: torch's all_gather_object unpickles, which runs whatever code is sent. With nccl the host
    waits for its GPU; `gather_through_store` does not, and takes ranks that may have different collectives then.
    """
    if not is_distributed():
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=group_device(group))
    sizes = [torch.empty(1, dtype=torch.int64, device=text.device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=text.device), group=group)
    # NCCL gathers tensors of one size only, so shorter texts are padded.
    longest = int(max(sizes))
    texts = [text.new_empty(longest) for _ in sizes]
    dist.all_gather(texts, nn.functional.pad(text, (0, longest - len(text))), group=group)
    return [json.loads(bytes(padded[: int(size)].tolist())) for size, padded in zip(sizes, texts, strict=True)]


def from_rank_0(value: Any) -> Any:
    """Return what rank 0 passes, by a collective; the other ranks' values are not looked at. Every rank must call it.

    The value travels as JSON, as in `gather_json`, and once to each rank: it may be large.
    """
    if not is_distributed():
        return value
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(group_device())
    size = torch.tensor([len(text)], device=text.device)
    dist.broadcast(size, src=0)
    if rank():
        text = text.new_empty(int(size))
    dist.broadcast(text, src=0)
    return json.loads(text.cpu().numpy().tobytes())


def gather_through_store(value: Any) -> list[Any]:
    """Return what each rank passes, in order of the ranks, without a collective. Every rank must call it.

    The values travel as JSON through the key-value store by which the ranks found each other, so no host waits for its
    GPU, and ranks that then have different collectives do not hang here.
    """
    if answering_ranks() == 1:
        return [value]
    store = dist.distributed_c10d._get_default_store()  # torch 2.11 has no public name for it
    # The store itself counts each rank's calls: a process may have been in other groups, with other ranks, before.
    key = f"mmfsdp/{store.add(f'mmfsdp/calls of {rank()}', 1)}"
    store.set(f"{key}/{rank()}", json.dumps(value))
    if rank() == 0:
        # One key for the answer: with N ranks the store serves 2 N requests, not N * N.
        texts = [store.get(f"{key}/{other}").decode() for other in range(world_size())]
        store.set(f"{key}/all", f"[{','.join(texts)}]")
    return json.loads(store.get(f"{key}/all"))


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Return the device that a process group's tensors must be on: the current GPU with nccl, else the CPU."""
    # NCCL takes CUDA tensors only; gloo takes CPU tensors.
    if is_distributed() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on. With cpu_offload its shards lie elsewhere."""
    if isinstance(model, FullyShardedDataParallel):
        return torch.device(model.compute_device or "cpu")
    if isinstance(model, FSDPModule):
        # The mesh has the device of compute. With cpu_offload the shards themselves are on the CPU.
        for p in model.parameters():
            if isinstance(p, DTensor) and p.device_mesh.device_type == "cuda":
                return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters()).device


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
