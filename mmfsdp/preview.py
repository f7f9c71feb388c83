"""What a run will be, before any rank starts: the frozen model on the meta device, its plan and its cost."""

from __future__ import annotations

from torch import nn

from .build import build_model
from .estimate import Estimate, estimate
from .freeze import freeze
from .params import ModelParams, RunParams
from .plan import WrapPlan, make_plan


def preview(params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a run and its cost per rank. Needs no weights, no process group and no GPU."""
    return plan_for(frozen_model(params.model), params)


def frozen_model(params: ModelParams) -> nn.Module:
    """The model without weights, frozen as it will be trained."""
    model, _ = build_model(params, meta=True)
    freeze(model, params.freeze)
    return model


def plan_for(model: nn.Module, params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a model that is frozen already, and its cost per rank."""
    plan = make_plan(model, params.fsdp, world_size=params.launch.ranks)
    return plan, estimate(plan, params.train, sources=len(params.data.sources()))
