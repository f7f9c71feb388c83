"""What a real step sent: collectives by kind and phase, counted as they happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from ..wrap import gloo

_KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_OPS: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all-reduce", 0, 1),
    "allreduce_coalesced_": ("all-reduce", 0, 1),
    "_allgather_base_": ("all-gather", 0, 2),
    "allgather_": ("all-gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 2),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 2),
    "reduce_scatter_": ("reduce-scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
    "alltoall_base_": ("all-to-all", 1, 2),
}
"""Operator of torch.distributed: (kind, place of the whole tensor among its arguments, place of the group)."""
_active: list[Collectives] = []
_library: list[torch.library.Library] = []


@dataclass(frozen=True)
class Counted:
    """Collectives of one kind and phase."""

    kind: str
    phase: str
    """forward, backward, or control (an all-reduce outside backward)."""
    count: int
    bytes: int
    """Of the whole tensors, all ranks' parts together."""
    wire_bytes: int
    """What this rank sent, by ring algorithms."""


class Collectives:
    """Counts this process's collectives while entered: `with Collectives() as counted: ...; counted.wire_bytes`.

    Sees DDP, FSDP1, FSDP2 and direct calls alike, whatever the device: all of them reach the c10d operators, and a
    kernel registered there counts and passes on. Nothing of torch is patched, and other operators are not touched.
    """

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._bytes: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> Collectives:
        if not _active:
            _library.append(_counting_kernels())
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        if not _active:
            _library.pop()._destroy()

    def reset(self) -> None:
        """Start again from nothing."""
        self._calls.clear()
        self._bytes.clear()

    def rows(self) -> list[Counted]:
        """What was counted, by kind and phase."""
        found: dict[tuple[str, str], list[int]] = {}
        for (kind, phase, ranks), calls in self._calls.items():
            nbytes = self._bytes[kind, phase, ranks]
            row = found.setdefault((kind, phase), [0, 0, 0])
            for i, value in enumerate((calls, nbytes, nbytes * (ranks - 1) // ranks * (1 + (kind == "all-reduce")))):
                row[i] += value
        return [Counted(kind, phase, *row) for (kind, phase), row in sorted(found.items())]

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(row.wire_bytes for row in self.rows())

    def _count(self, kind: str, nbytes: int, ranks: int) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        phase = "backward" if in_backward else "control" if kind == "all-reduce" else "forward"
        self._calls[kind, phase, ranks] += 1
        self._bytes[kind, phase, ranks] += nbytes


def _counting_kernels() -> torch.library.Library:
    """The c10d operators have kernels per device and none for autograd: ours sit there, on top of the devices'."""
    library = torch.library.Library("c10d", "IMPL")
    for name, (kind, whole, group) in _OPS.items():
        for key in _KEYS:
            library.impl(name, _counting(name, kind, whole, group), key, with_keyset=True)
    return library


def _counting(name: str, kind: str, whole: int, group: int) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default
    below = torch._C._after_autograd_keyset

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = args[whole]
        nbytes = tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(t.nbytes for t in tree_leaves(tensors))
        ranks = ProcessGroup.unbox(args[group]).size()
        if gloo.standing_for is None or gloo.standing_for:
            what = gloo.standing_for.pop() if gloo.standing_for else (kind, nbytes)
            for counter in _active:
                counter._count(*what, ranks)
        return operator.redispatch(keys & below, *args, **kwargs)

    return kernel
