"""A wrapped model as it is between two steps, and what people call on it beside forward."""

from __future__ import annotations

from functools import wraps
from typing import Any

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


def serve_generate(wrapped: nn.Module, generate: Any) -> None:
    """Give a wrapped model a `generate`, after which nothing stays gathered: an optimizer made then finds shards."""

    @wraps(generate)
    def generated(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        reshard(wrapped)
        return out

    wrapped.generate = generated  # type: ignore[assignment]
