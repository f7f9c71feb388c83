"""What a run will be, before any rank starts: the frozen model on the meta device, its plan and its cost."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .build import build_model
from .estimate import Estimate, Machine, estimate
from .freeze import freeze
from .params import ModelParams, RunParams
from .plan import WrapPlan, make_plan, with_moments
from .plan.activity import Recorded, record, recorded_alike, with_recorded

KEPT = 32
"""Examples whose moments are kept: they take a hundred times as long as all else."""
KEPT_MODELS = 2
_building = threading.Lock()
_models: OrderedDict[str, nn.Module] = OrderedDict()
_examples: OrderedDict[Hashable, Recorded] = OrderedDict()


def preview(params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a run and its cost per rank. Needs no weights, no process group and no GPU."""
    return list(previews(params))[-1]


def previews(params: RunParams) -> Iterator[tuple[WrapPlan, Estimate]]:
    """The same; where its activations are not known yet, first without, then with.

    The newest models and examples are kept, since other choices change more often.
    """
    key = _key(params)
    with _building:  # transformers' lazy modules break when two threads import them
        if key not in _models:
            _models[key] = frozen_model(params.model)
        model = _models[key]
        if len(_models) > KEPT_MODELS:
            _models.popitem(last=False)
    plan = plan_of(model, params, counted=lambda plan: _counted(model, plan, params))
    if _alike(plan, params) not in _examples:
        yield plan, cost_of(plan, params)
        if plan.refused:
            return
    plan = _counted(model, plan, params)
    yield plan, cost_of(plan, params)


def _counted(model: nn.Module, plan: WrapPlan, params: RunParams) -> WrapPlan:
    alike = _alike(plan, params)
    if alike not in _examples:
        _examples[alike] = record(model, plan, example_of(model, params))
        if len(_examples) > KEPT:
            _examples.popitem(last=False)
    return with_recorded(plan, _examples[alike])


def _alike(plan: WrapPlan, params: RunParams) -> Hashable:
    return _key(params), params.train.batch_size, params.data.max_length, recorded_alike(plan)


def known(params: RunParams) -> bool:
    """True if its model is kept: a plan of it takes no time, and asks nothing of a hub."""
    return _key(params) in _models


def _key(params: RunParams) -> str:
    return json.dumps(params.to_dict()["model"])


def check(params: RunParams) -> WrapPlan:
    """The plan, for its warnings. Raises ParamError for what cannot be planned and what the lint calls an error."""
    plan = next(previews(params))[0]
    plan.check()
    return plan


def frozen_model(params: ModelParams) -> nn.Module:
    """The model without weights, frozen as it will be trained."""
    model, _ = build_model(params, meta=True)
    freeze(model, params.freeze)
    return model


def plan_for(model: nn.Module, params: RunParams) -> tuple[WrapPlan, Estimate]:
    """The plan of a model that is frozen already, and its cost per rank."""
    plan = plan_of(model, params)
    if not plan.refused:
        plan = with_moments(model, plan, example_of(model, params))
    return plan, cost_of(plan, params)


def plan_of(model: nn.Module, params: RunParams, *, counted: Callable[[WrapPlan], WrapPlan] | None = None) -> WrapPlan:
    """The plan of a model that is frozen already, without its cost: enough for the lint. counted: gives one its
    moments, of which only AUTO has need."""
    counted = counted or (lambda plan: with_moments(model, plan, example_of(model, params)))
    train = replace(params.train, accumulation=params.train.accumulation * len(params.data.sources()))
    return make_plan(model, params.fsdp, world_size=params.launch.ranks, train=train, counted=counted)


def cost_of(plan: WrapPlan, params: RunParams, *, machine: Machine | str | None = None) -> Estimate:
    """What a run's plan costs each rank; on a machine, with the time of a step."""
    return estimate(plan, params.train, sources=len(params.data.sources()), machine=machine)


def example_of(model: nn.Module, params: RunParams) -> dict[str, Any]:
    """What a micro-step's forward is given at its largest, with a picture (sound, ...) per sample; no values."""
    size, length = params.train.batch_size, params.data.max_length
    encoders = getattr(model, "encoders", None) or {"vision": model.vision_encoder}
    lead = {"vision": (size, 1, 1)}
    with torch.device("meta"):
        ids = torch.empty(size, length, dtype=torch.long)
        media = {key: torch.empty(*lead.get(key, (size, 1)), *encoders[key].item_shape) for key in encoders}
    return {"input_ids": ids, "attention_mask": ids, "labels": ids, "media": media}
