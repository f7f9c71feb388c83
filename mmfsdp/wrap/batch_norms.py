"""Batch norms whose weights are gathered in 16 bits, beside statistics that are not: torch wants one format of both."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..plan import WrapPlan


def widen_batch_norms(model: nn.Module, plan: WrapPlan) -> None:
    """Have each batch norm use its weights in its statistics' format, in place, where they may differ."""
    if plan.fsdp.mixed_precision or plan.fsdp.frozen_dtype:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.forward = partial(_widened, module, module.forward)  # type: ignore[method-assign]


def _widened(module: nn.Module, forward: Any, x: Any) -> Any:
    own, dtype = vars(module), module.running_mean.dtype  # type: ignore[union-attr]
    given = {key: p for key in ("weight", "bias") if (p := getattr(module, key)) is not None and p.dtype != dtype}
    before = {key: own[key] for key in given if key in own}  # FSDP1's flat parameters are seen through such
    own.update((key, p.to(dtype)) for key, p in given.items())
    try:
        return forward(x)
    finally:
        for key in given:
            del own[key]
        own.update(before)
