"""What a run will be, before any rank starts: the frozen model on the meta device, its plan and its cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .build import build_model
from .estimate import Estimate, estimate
from .freeze import freeze
from .params import ModelParams, RunParams
from .plan import WrapPlan, make_plan, with_moments


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
    plan = plan_of(model, params)
    if not any(f.level == "error" for f in plan.lint):
        plan = with_moments(model, plan, example_of(model, params))
    return plan, cost_of(plan, params)


def plan_of(model: nn.Module, params: RunParams) -> WrapPlan:
    """The plan of a model that is frozen already, without its cost: enough for the lint."""
    return make_plan(model, params.fsdp, world_size=params.launch.ranks)


def cost_of(plan: WrapPlan, params: RunParams) -> Estimate:
    """What a run's plan costs each rank."""
    return estimate(plan, params.train, sources=len(params.data.sources()))


def example_of(model: nn.Module, params: RunParams) -> dict[str, Any]:
    """What a micro-step's forward is given at its largest, with a picture (sound, ...) per sample; no values."""
    size, length = params.train.batch_size, params.data.max_length
    encoders = getattr(model, "encoders", None) or {"vision": model.vision_encoder}
    lead = {"vision": (size, 1, 1)}
    with torch.device("meta"):
        ids = torch.empty(size, length, dtype=torch.long)
        media = {key: torch.empty(*lead.get(key, (size, 1)), *encoders[key].item_shape) for key in encoders}
    return {"input_ids": ids, "attention_mask": ids, "labels": ids, "media": media}
