"""Measure a step with RMS norms and SwiGLU written out, and as one kernel each: `model.fused_norms`, `fused_swiglu`."""

from __future__ import annotations

from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mmfsdp.core.fake_tensors import copy_with
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.bench.bench_models import OURS, measure_step, time_step
from mmfsdp.kit.models.fused_norms import fuse_norms
from mmfsdp.kit.models.fused_swiglu import fuse_swiglu, fused_swiglu, swiglu, swiglu_backward
from tests.bench.gpu.device import DEVICE, ON_GPU, seconds_of
from tests.bench.gpu.flamingo import batch_of, plan_of, predicted, pristine, wrap
from tests.bench.gpu.methods import SHARD, plan_for
from tests.bench.gpu.rows import Rows

FIELDS = {"mixed_precision": "bf16", **OURS[SHARD]}
SAMPLES = 16 if ON_GPU else 2
NONE, NORMS, BOTH = "none", "norms", "norms and SwiGLU"
TURNS = (NONE, NORMS, BOTH, NORMS, NONE) if ON_GPU else (NONE, BOTH)
"""There and back, so that a clock that drifts is seen, and adds as much to each."""
ROUNDS = 8 if ON_GPU else 1
SHAPE = (8192, 8192) if ON_GPU else (4, 64)
"""Positions of 16 samples, and outputs of the gate: a layer's activation."""


def norms(rows: Rows) -> None:
    """Write a row for the kernels of SwiGLU, then one for each turn of a step."""
    rows.attempt({"fused": "the activation alone"}, activation)
    for fused in TURNS:
        if rows.seconds_left > (8 if ON_GPU else 0):
            rows.attempt({"fused": fused}, partial(row_of, fused))


def activation() -> dict[str, Any]:
    """Compare the kernels with plain operators of the CPU, and their time with the activation written out."""
    grad, gate, up = torch.randn(3, *SHAPE).bfloat16()
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (gate, up)]
    on_device = grad.to(DEVICE)
    seconds = []
    for compute in (fused_swiglu, lambda gate, up: nn.functional.silu(gate) * up):
        out = compute(*leaves)
        seconds.append(seconds_of(lambda compute=compute: torch.autograd.grad(compute(*leaves), leaves, on_device)))
        if compute is fused_swiglu:
            found = (out, *torch.autograd.grad(out, leaves, on_device))
    for tensor, expected in zip(found, (swiglu(gate, up), *swiglu_backward(grad, gate, up)), strict=True):
        torch.testing.assert_close(tensor.cpu(), expected)
    return {"ms": seconds[0] * 1e3, "written out ms": seconds[1] * 1e3, "GB/s": 8 * gate.nbytes / seconds[0] / 1e9}


@cache
def model_with(fused: str) -> nn.Module:
    """Return the model with fused kernels, in main memory; all share their weights."""
    if fused == NONE:
        return pristine()

    def shared(_: str, tensor: Tensor) -> Tensor:
        same = tensor.detach()
        return nn.Parameter(same, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else same

    model = copy_with(pristine(), shared)
    fuse_norms(model)
    if fused == BOTH:
        fuse_swiglu(model)
    return model


@cache
def plan_with(fused: str) -> WrapPlan:
    """Return its plan: without fused kernels, that of an earlier part."""
    if fused == NONE:
        return plan_for(SHARD, SAMPLES, False)
    return plan_of(model_with(fused), batch_of(SAMPLES, mask=False), FIELDS)


def row_of(fused: str) -> dict[str, Any]:
    """Return the seconds and the peak of a step."""
    batch, plan = batch_of(SAMPLES, mask=False), plan_with(fused)
    method, memory = measure_step("norms", lambda _: wrap(model_with(fused), plan), batch, DEVICE)
    seconds = [time_step(method, batch, DEVICE) for _ in range(ROUNDS)]
    row = {"s": median(seconds), "least s": min(seconds), "most s": max(seconds), "operators": plan.kernels}
    row |= {"moved GB": plan.moved_bytes / 1e9, "peak GB": memory["peak_bytes"] / 1e9}
    return row | predicted(plan, peak=memory["peak_bytes"], seconds=median(seconds))
