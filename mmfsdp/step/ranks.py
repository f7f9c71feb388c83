"""What a step needs of all ranks: sums, the one norm of the gradient, and where a model computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard


@torch.no_grad()  # else `local` makes an autograd function of each
def sums_and_norm(model: nn.Module, sums: torch.Tensor, asked: bool) -> tuple[torch.Tensor, ...]:
    """(sums, gradient norm, ranks asked to make room) over all ranks, float64. Each element of the gradient counts
    once, wherever it is held."""
    squares: dict[int, list[torch.Tensor]] = {}
    for p in trainable(model):
        if p.grad is not None:
            squares.setdefault(_copies(model, p), []).append(local(p.grad))
    total = sums.new_zeros(())
    for copies, grads in squares.items():
        norms = torch.stack(torch._foreach_norm(grads)).to(device=sums.device, dtype=torch.float64)
        total += norms.square().sum() / copies
    summed = sum_over_ranks(torch.cat([sums, total[None], on(sums.device, [asked])]))
    return summed[:-2], summed[-2].sqrt(), summed[-1]


def _copies(model: nn.Module, p: nn.Parameter) -> int:
    """How many ranks hold the same elements of a gradient."""
    if isinstance(p, DTensor):
        sizes = zip(p.placements, p.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if not isinstance(placement, Shard))
    if isinstance(model, FullyShardedDataParallel):
        plan = getattr(model, "mmfsdp_plan", None)
        return plan.replicate if plan else 1
    return world_size()


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes."""
    if isinstance(model, FSDPModule):
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        if mesh is not None and mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    if isinstance(model, FullyShardedDataParallel):
        return torch.device(model.compute_device or "cpu")
    return next(model.parameters()).device


def sum_over_ranks(total: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def world_size() -> int:
    """Ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    """Plain numbers on the device, float64; nobody waits for them."""
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
