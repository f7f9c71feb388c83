"""Reduce-scatter over gloo that sends only what it must: gloo's own all-reduces a copy, at twice the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

standing_for: tuple[str, int] | None = None
"""(kind, bytes of the whole tensor) of the collective that an exchange carries out, while it does: for who counts."""


class GlooReduceScatter:
    """For `set_custom_reduce_scatter`: every rank sends each other one its part, and adds up what it gets."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 allocates by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """The sum or mean over ranks of this rank's part, in the order of ranks; done on return."""
        global standing_for
        assert not async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        ranks, rank = group.size(), group.rank()
        parts = input_tensor.view(ranks, -1)
        # The own part stays at home where that leaves one piece to send: always, with two ranks.
        sent = parts[1:] if rank == 0 else parts[:-1] if rank == ranks - 1 else parts
        sizes = [part.numel() for part in parts]
        if len(sent) < ranks:
            sizes[rank] = 0
        got = torch.empty_like(sent)
        standing_for = "reduce-scatter", input_tensor.nbytes
        try:
            dist.all_to_all_single(got.view(-1), sent.view(-1), sizes, sizes, group=group)
        finally:
            standing_for = None
        others = list(got) if len(sent) == ranks else [*got[:rank], parts[rank], *got[rank:]]
        torch.add(others[0], others[1], out=output_tensor)
        for part in others[2:]:
            output_tensor += part
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks
        input_tensor.untyped_storage().resize_(0)  # `allocate` made it; FSDP2 would hold it to the next reduction


def reduce_by_parts(module: FSDPModule, mesh: DeviceMesh) -> None:
    """Give a unit the above where gloo reduces it."""
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type == "cpu" and group.size() > 1 and dist.get_backend(group) == "gloo":
        module.set_custom_reduce_scatter(GlooReduceScatter())  # type: ignore[arg-type]  # ReduceScatter by its shape
