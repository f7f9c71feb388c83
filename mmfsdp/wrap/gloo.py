"""Gathers and reductions over gloo, part by part, straight to where they belong: gloo's own pass through copies.

Its all-gather fills a buffer and copies that; its reduce-scatter all-reduces a copy, at twice the bytes. A unit's
reduction travels while the next unit's backward computes, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..plan.wrapped import param_groups

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


class GlooAllGather:
    """For `set_custom_all_gather`: every rank broadcasts its part, which arrives in its place."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 allocates by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begin. FSDP2 waits before it copies out, so what is gathered ahead of need travels while this rank computes.

        input_tensor: this rank's part of output_tensor, where FSDP2 has put it.
        """
        parts = output_tensor.view(group.size(), -1)
        assert parts[group.rank()].data_ptr() == input_tensor.data_ptr()
        with _standing_for("all-gather", output_tensor):
            if len(parts) == 2:  # one call for both ways
                sizes = [0, input_tensor.numel()][:: 1 if group.rank() == 0 else -1]
                there = parts[1 - group.rank()]
                work = dist.all_to_all_single(there, input_tensor, sizes, sizes, group=group, async_op=True)
                assert work is not None
                return work
            works = [dist.broadcast(p, group=group, group_src=i, async_op=True) for i, p in enumerate(parts)]
        return Works([work for work in works if work is not None])


class UnderWay:
    """The reduction of a model's gradients that has begun and is not over: one at most."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def begin(self, finish: Callable[[], None]) -> None:
        """finish: waits for it; called before the next reduction, or when this backward is over."""
        self.finish()
        self._finish = finish
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Have it over."""
        finish, self._finish = self._finish, None
        if finish:
            finish()


class GlooReduceScatter:
    """For `set_custom_reduce_scatter`: every rank sends each other one its part, and adds up what it gets."""

    def __init__(self, module: FSDPModule, under_way: UnderWay, *, one_axis: bool):
        """one_axis: this is all that is reduced; else others go on with what comes of it, at once."""
        self.module, self.under_way, self.one_axis = module, under_way, one_axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As FSDP2 allocates by default; first the reduction before gives back what it holds."""
        self.under_way.finish()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **_: bool
    ) -> None:
        """The sum or mean over ranks of this rank's part, in the order of ranks; there when backward is over, or on
        return where FSDP2 does more with it."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        ranks, rank = group.size(), group.rank()
        parts = input_tensor.view(ranks, -1)
        # Of two ranks neither sends itself its own.
        sent = parts if ranks > 2 else parts[1 - rank]
        sizes = [parts[0].numel() * (ranks > 2 or i != rank) for i in range(ranks)]
        got = torch.empty_like(sent)
        with _standing_for("reduce-scatter", input_tensor):
            work = dist.all_to_all_single(got.view(-1), sent.view(-1), sizes, sizes, group=group, async_op=True)
        assert work is not None

        def finish() -> None:
            work.wait()
            others = list(got) if ranks > 2 else [got, parts[rank]][:: 1 if rank else -1]
            torch.add(others[0], others[1], out=output_tensor)
            for part in others[2:]:
                output_tensor.add_(part)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(ranks)
            input_tensor.untyped_storage().resize_(0)  # `allocate` made it; FSDP2 would hold it to the next reduction

        if self._is_last_word(output_tensor.dtype, op):
            self.under_way.begin(finish)
        else:
            finish()

    def _is_last_word(self, dtype: torch.dtype, op: Any) -> bool:
        """Whether FSDP2 only stores views of the outcome as the gradients."""
        groups = param_groups(self.module._get_fsdp_state())
        params = [p.sharded_param for group in groups for p in group.fsdp_params]
        return (
            self.one_axis
            and op == dist.ReduceOp.AVG  # else it divides
            and all(p.dtype == dtype for p in params)  # else it converts
            and all(p.grad is None for p in params)  # else it adds
            and not any(p._post_accumulate_grad_hooks for p in params)
            and not any(group._all_reduce_hook for group in groups)
        )


def exchange_by_parts(module: FSDPModule, mesh: DeviceMesh, under_way: UnderWay) -> None:
    """Give a unit the above where gloo gathers and reduces it. under_way: of its model."""
    group = mesh.get_group(mesh.ndim - 1)
    if mesh.device_type == "cpu" and group.size() > 1 and dist.get_backend(group) == "gloo":
        module.set_custom_all_gather(GlooAllGather())  # type: ignore[arg-type]  # AllGather by its shape
        reduce = GlooReduceScatter(module, under_way, one_axis=mesh.ndim == 1)
        module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]


@contextmanager
def _standing_for(kind: str, whole: torch.Tensor) -> Iterator[None]:
    global standing_for
    standing_for = [(kind, whole.nbytes)]
    try:
        yield
    finally:
        standing_for = None
