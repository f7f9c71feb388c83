"""Ask the process group, and count what real collectives send."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .plan import CollectiveCount, ring_bytes


def is_distributed() -> bool:
    """Return True if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return what each rank passes, in order of the ranks. Every rank must call it.

    The values travel as JSON: torch's all_gather_object unpickles, which runs whatever code is sent.
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


class Collectives:
    """Count this process's collectives while entered: `with Collectives() as counted: ...; counted.wire_bytes`.

    Sees DDP, FSDP1, FSDP2 and direct calls alike, on every device: all of them call torch's c10d operators, where a
    kernel registered on entry counts each call and passes it on. Nothing of torch is patched. Left out is what other
    threads than the entering one and autograd's send: a checkpoint that is written meanwhile.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], list[int]] = {}

    def __enter__(self) -> Collectives:
        # Only one library may register a kernel for an operator and key, so all counters share it.
        if not _active:
            _libraries.append(register_counting_kernels())
        self._thread = threading.get_ident()
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if not _active:
            _libraries.pop()._destroy()

    def reset(self) -> None:
        """Forget what was counted."""
        self._counts.clear()

    def rows(self) -> list[CollectiveCount]:
        """Return the counts, by kind and phase."""
        rows: dict[tuple[str, str], CollectiveCount] = {}
        for (kind, phase, ranks), (count, nbytes) in sorted(self._counts.items()):
            row = rows.get((kind, phase), CollectiveCount(kind, phase, 0, 0, 0))
            sent = row.wire_bytes + ring_bytes(kind, nbytes, ranks)
            rows[kind, phase] = CollectiveCount(kind, phase, row.count + count, row.bytes + nbytes, sent)
        return list(rows.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(row.wire_bytes for row in self.rows())

    def _add(self, kind: str, nbytes: int, ranks: int) -> None:
        if torch._C._current_graph_task_id() != -1:  # autograd is running a backward in this thread
            phase = "backward"
        elif threading.get_ident() != self._thread:
            return  # a checkpoint that a thread writes meanwhile
        else:
            # FSDP and DDP reduce in backward only, so what else is all-reduced is a step's loss, norm and counts.
            phase = "control" if kind == "all-reduce" else "forward"
        counts = self._counts.setdefault((kind, phase, ranks), [0, 0])
        counts[0] += 1
        counts[1] += nbytes


_active: list[Collectives] = []
_libraries: list[torch.library.Library] = []

_OPERATORS = {
    "allreduce_": ("all-reduce", 0, 1),
    "allreduce_coalesced_": ("all-reduce", 0, 1),
    "_allgather_base_": ("all-gather", 0, 2),
    "allgather_": ("all-gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "reduce_scatter_": ("reduce-scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
}
"""Operator of c10d: its kind, and the indices of the full tensor and of the process group among its arguments."""


def register_counting_kernels() -> torch.library.Library:
    """Register a kernel for each operator under the autograd keys, which c10d leaves free, above the devices' own."""
    # A dispatch key that no kernel of c10d has: ours runs first and passes the call on to the device's kernel.
    library = torch.library.Library("c10d", "IMPL")
    for name, (kind, tensor_index, group_index) in _OPERATORS.items():
        kernel = counting_kernel(name, kind, tensor_index, group_index)
        for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
            library.impl(name, kernel, key, with_keyset=True)
    return library


def counting_kernel(name: str, kind: str, tensor_index: int, group_index: int) -> Callable[..., Any]:
    """Return a kernel that counts a call and passes it on to the device's kernel."""
    operator = getattr(torch.ops.c10d, name).default

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        nbytes = sum(tensor.nbytes for tensor in tree_leaves(args[tensor_index]))
        # The group may be one axis of a mesh, with fewer ranks than the world.
        ranks = ProcessGroup.unbox(args[group_index]).size()
        for counter in _active:
            counter._add(kind, nbytes, ranks)
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    return kernel
