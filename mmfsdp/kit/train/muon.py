"""Muon for matrices that may be sharded (Jordan 2024; scaled as in Liu et al. 2025), and AdamW for the rest."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ...core.several_optimizers import SeveralOptimizers
from ...core.step import local_part
from ...params import ParamError
from .optimizer import adamw

FIELD = "train.optimizer"
MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that is iterated: github.com/KellerJordan/Muon."""
ITERATIONS = 5
MAX_ELEMENTS = 2**28
"""Elements of a matrix that is gathered: 0.5 GiB in bf16, in which it is orthogonalized, and three times as much while
it is."""


class Muon(Optimizer):
    """Muon, whose step is that of whole matrices, also where a rank holds some rows of them.

    The momentum is of shards. Its update is gathered a matrix at a time, in bf16, and every rank orthogonalizes it and
    takes its rows. The results are those of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, so that the learning
    rates and the weight decay of AdamW serve.
    """

    gathers_up_to = MAX_ELEMENTS
    gathers = torch.bfloat16.itemsize

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = MOMENTUM) -> None:
        """Raise ParamError for a parameter that is no matrix, which flat shards of FSDP1 are not, or too large."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    words = f"Muon is for whole matrices, and a parameter has the shape {tuple(p.shape)}; give it "
                    raise ParamError(FIELD, f"{words}matrices only, and wrap with FSDP2 or DDP")
                if isinstance(p, DTensor) and p.numel() > MAX_ELEMENTS:
                    words = f"a matrix of shape {tuple(p.shape)} has more than the {MAX_ELEMENTS:,} elements that are "
                    raise ParamError(FIELD, f"{words}gathered at once; give it to AdamW")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change each matrix. Every rank must call it. closure: None."""
        assert closure is None, "a step has one backward"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._change(p, group)

    def _change(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        gradient, momentum = local_part(p.grad), local_part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])  # Nesterov's
        direction = own_part(p, orthogonal(whole_of(p, update.bfloat16())))
        shard, lr = local_part(p), float(group["lr"])
        shard.mul_(1 - lr * group["weight_decay"])
        shard.add_(direction, alpha=-lr * 0.2 * max(p.shape) ** 0.5)  # as large as an update of AdamW


def whole_of(p: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return the whole matrix of which this rank has a shard, sharded as a parameter."""
    if not isinstance(p, DTensor):
        return shard
    # Not `full_tensor`: its collective is not among those that a run counts (meters.py).
    axis = next(axis for axis, placement in enumerate(p.placements) if isinstance(placement, Shard))
    ranks, (rows, columns) = p.device_mesh.size(axis), p.shape
    padded = shard.new_zeros(ceil(rows / ranks), columns)  # FSDP2 shards rows; the last ranks may have fewer
    padded[: shard.size(0)] = shard
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=p.device_mesh.get_group(axis))
    return torch.cat(parts)[:rows]


def own_part(p: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole matrix, sharded as a parameter."""
    if not isinstance(p, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return nearly the orthogonal matrix that is nearest to one in bf16, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    rows = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    rows = rows / rows.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = rows @ rows.T
        rows = torch.addmm(rows, torch.addmm(gram, gram, gram, beta=b, alpha=c), rows, beta=a)
    return rows.T if matrix.size(0) > matrix.size(1) else rows


def muon(groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    """Return Muon of the groups of matrices, and AdamW of the others, as one optimizer."""
    matrices = [group for group in groups if group["matrices"]]
    others = [group for group in groups if not group["matrices"]]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=lr))
    if others:
        optimizers.append(adamw(others, lr=lr))
    return SeveralOptimizers(*optimizers)
