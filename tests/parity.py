"""Ranks beside one process, and beside their plan: what a model learns, what each rank sends and holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import TrainParams
from mmfsdp.predict import estimate


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each rank may hold a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bytes_held(model: nn.Module) -> int:
    """Return the bytes of this rank's parameters, each storage once; FSDP2 pads the shard of a rank that has none."""
    shards = [local(p).untyped_storage() for p in model.parameters() if p.numel()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in shards}.values())


def wire(rows: Iterable[Any], *, backend: str = "", control: bool = True) -> list[tuple]:
    """Return counted collectives, or predicted ones, so that they can be compared. DDP cuts its gradients into buckets
    as it likes, and their number is not predicted. control: with the reductions of numbers that all ranks must know."""
    found = []
    for row in rows:
        if control or row.phase != "control":
            found.append((row.kind, row.phase, 0 if backend == "DDP" else row.count, row.bytes, row.wire_bytes))
    return sorted(found)


def sent(row: dict[str, Any], plan: WrapPlan) -> list[tuple]:
    """Return what `tests.bench.peaks.measure` counted, as `wire` returns it."""
    return [(kind, phase, 0 if plan.backend == "DDP" else n, *sizes) for kind, phase, n, *sizes in row["wire"]]


def two_steps(model: nn.Module, batches: list[Any]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of two steps of one process over the batches of all ranks."""
    optimizer, _ = build_optimizer(model.train(), TrainParams())
    steps = [train_step(model, batches, optimizer, max_grad_norm=1.0) for _ in range(2)]
    assert steps[0].grad_norm > 0, "something must train"
    return [(metrics.loss, metrics.grad_norm) for metrics in steps]


def check_ranks(ranks: list[dict[str, Any]], plan: WrapPlan, expected: list[tuple[float, float]], rel=1e-5) -> None:
    """Check what `tests.bench.peaks.measure` returned on each rank, but for the peak."""
    cost = estimate(plan, TrainParams(device="cpu"))
    for row in ranks:
        for ours, alone in zip(row["steps"], expected, strict=True):
            assert ours == pytest.approx(alone, rel=rel)
        assert not row["frozen changed"]
        assert row["parameters"] == cost.memory.parameters
        assert sent(row, plan) == wire(cost.wire, backend=plan.backend)
