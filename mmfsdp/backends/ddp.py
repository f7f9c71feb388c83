"""Apply a plan with DDP: every rank holds the whole model, and gradients are all-reduced."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..core.plan import WrapPlan
from ..core.wrapper import Fill, Wrapper

# torch 2.13 deprecates `broadcast_buffers`, and with it warns in every run. Drop the old name with torch 2.12.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"
"""DDP's argument that keeps buffers equal to rank 0's in every forward."""


class DDPWrapper(Wrapper):
    """Wraps with DistributedDataParallel."""

    def wrap(
        self,
        model: nn.Module,
        plan: WrapPlan,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        replicated: set[nn.Parameter],
        fill: Fill,
    ) -> nn.Module:
        """Return the model inside DDP, with autocast for mixed precision: DDP's own is experimental."""
        fill([""])
        model.to(device)
        # Autocast computes in 16 bits and leaves the weights in fp32.
        if plan.fsdp.autocast_precision:
            autocast = torch.autocast(device.type, dtype=plan.fsdp.autocast_precision.to_torch())
            model.forward = autocast(model.forward)  # type: ignore[method-assign]
        # As in FSDP: ranks start equal, then buffers are each rank's own.
        sync_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
        return DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=mesh.get_group(0),
            init_sync=False,  # done above
            gradient_as_bucket_view=True,
            **sync_buffers,
        )


WRAPPER = DDPWrapper()
