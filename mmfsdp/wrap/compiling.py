"""torch.compile, unit by unit."""

from __future__ import annotations

import torch
from torch import nn

from ..plan import WrapPlan


def compile_units(model: nn.Module, plan: WrapPlan) -> None:
    """Compile the units that hold no other, in place, where the plan says so.

    Only `forward` is replaced, so names stay, and the wrapper's hooks stay outside, uncompiled.
    """
    if not plan.fsdp.compile_units:
        return
    plan.fsdp.check_machine()
    names = [name for unit in plan.units if unit.params for name in unit.modules if name]
    for name in names:
        if not any(other.startswith(f"{name}.") for other in names):
            module = model.get_submodule(name)
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
