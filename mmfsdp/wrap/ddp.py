"""A plan applied as DDP: every rank holds everything."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..params import Precision
from ..plan import WrapPlan
from .rest import serve_generate
from .start import Source, fill


def wrap_ddp(
    model: nn.Module, plan: WrapPlan, *, device: torch.device, mesh: DeviceMesh, weights: Source | None
) -> nn.Module:
    """The model inside DDP; under autocast where mixed precision is asked for."""
    if weights is not None:
        fill(model, weights, lambda _: True, device=device)
    model.to(device)
    if plan.fsdp.mixed_precision not in (None, Precision.FP32):
        dtype = plan.fsdp.mixed_precision.to_torch()
        model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)  # type: ignore[method-assign]
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(0),
        broadcast_buffers=False,  # ranks start equal; buffers that training changes are each rank's own, as in FSDP
        init_sync=False,
        gradient_as_bucket_view=True,
    )
    if hasattr(model, "generate"):
        serve_generate(wrapped, model.generate)
    return wrapped
