"""Reduce gradients over ranks in the last micro-batch of a step only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from .model_record import plan_of, record_of
from .plan import UnitKind


@contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Reduce gradients over ranks in the last micro-batch only. Units that backward does not reshard stay gathered.

    After an error inside, the model's record has `step_failed`.
    """
    try:
        if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not last:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            set_gradient_sync(model, last)
        yield
    except BaseException:
        if isinstance(model, FSDPModule):
            set_gradient_sync(model, True)  # the next backward may be one of the caller's
        record_of(model).step_failed = True
        raise


def set_gradient_sync(model: Any, last: bool) -> None:
    """Set what FSDP2 does in a micro-batch: in the last one it reduces gradients, and reshards each unit."""
    model.set_requires_gradient_sync(last)
    plan = plan_of(model)  # None for a model that others wrapped
    for unit in plan.sharded_units if plan else ():
        module: Any = model.get_submodule(unit.modules[0])
        if unit.kind is UnitKind.FROZEN:
            # torch 2.11 fails after a backward without sync if a unit has not run, such as a cached encoder.
            module.set_requires_gradient_sync(True, recurse=False)
        if not unit.reshard_after_backward:
            module.set_reshard_after_forward(last and unit.reshard_after_forward, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
