"""Gathers and reductions over gloo, part by part, straight to where they belong: gloo's own pass through copies.

Its all-gather fills a buffer and copies that; its reduce-scatter all-reduces a copy, at twice the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

standing_for: list[tuple[str, int]] | None = None
"""(kind, bytes of the whole tensor) of the collective that others carry out here, while they are called; whoever counts
takes it out with the first of them."""


class Works(dist.Work):
    """Collectives under way, as one: done once all are."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self.works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all; with a timeout of 0 as long as the group does."""
        while self.works:
            self.works.pop(0).wait(timeout)
        return True


class _Comm:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 allocates by default."""
        return torch.empty(*size, dtype=dtype, device=device)


class GlooAllGather(_Comm):
    """For `set_custom_all_gather`: every rank broadcasts its part, which arrives in its place."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begin. FSDP2 waits before it copies out, so what is gathered ahead of need travels while this rank computes.

        input_tensor: this rank's part of output_tensor, where FSDP2 has put it.
        """
        parts = output_tensor.view(group.size(), -1)
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr()
        with _standing_for("all-gather", output_tensor):
            works = [dist.broadcast(p, group=group, group_src=i, async_op=True) for i, p in enumerate(parts)]
        return Works([work for work in works if work is not None])


class GlooReduceScatter(_Comm):
    """For `set_custom_reduce_scatter`: every rank sends each other one its part, and adds up what it gets."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """The sum or mean over ranks of this rank's part, in the order of ranks; done on return."""
        assert not async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        ranks, rank = group.size(), group.rank()
        parts = input_tensor.view(ranks, -1)
        # Of two ranks neither sends itself its own.
        sent = parts if ranks > 2 else parts[1 - rank]
        sizes = [parts[0].numel() * (ranks > 2 or i != rank) for i in range(ranks)]
        got = torch.empty_like(sent)
        with _standing_for("reduce-scatter", input_tensor):
            dist.all_to_all_single(got.view(-1), sent.view(-1), sizes, sizes, group=group)
        others = list(got) if ranks > 2 else [got, parts[rank]][:: 1 if rank else -1]
        torch.add(others[0], others[1], out=output_tensor)
        for part in others[2:]:
            output_tensor += part
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        input_tensor.untyped_storage().resize_(0)  # `allocate` made it; FSDP2 would hold it to the next reduction


def exchange_by_parts(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Give a unit the above where gloo gathers and reduces it."""
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type == "cpu" and group.size() > 1 and dist.get_backend(group) == "gloo":
        module.set_custom_all_gather(GlooAllGather())  # type: ignore[arg-type]  # AllGather by its shape
        module.set_custom_reduce_scatter(GlooReduceScatter())  # type: ignore[arg-type]


@contextmanager
def _standing_for(kind: str, whole: torch.Tensor) -> Iterator[None]:
    global standing_for
    standing_for = [(kind, whole.nbytes)]
    try:
        yield
    finally:
        standing_for = None
