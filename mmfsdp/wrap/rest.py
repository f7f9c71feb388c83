"""A wrapped model as it is between two steps."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard


def reshard(model: nn.Module) -> None:
    """Shard again what a forward without a backward left gathered, and forget in what order it came: the next step
    then gathers as every other does. torch has no call for the latter, nor FSDP1 for either."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
        elif isinstance(module, FullyShardedDataParallel):
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:
                _reshard(module, handle, True)
