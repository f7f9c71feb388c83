"""Preview a run before any rank starts: the frozen model on the meta device, its plan and its cost."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from ..core.freeze import freeze
from ..core.memory_events import Recording, record_memory, with_recording
from ..core.plan import WrapPlan
from ..core.planner import make_plan, with_memory_events
from ..data import check_data
from ..estimate import Estimate, Machine, estimate
from ..models.build import build_model
from ..params import FrozenPolicy, ModelParams, RunParams

MAX_RECORDINGS = 32
"""Recordings that are kept: recording takes a hundred times as long as planning."""
MAX_MODELS = 2
"""Models that are kept."""
_building = threading.Lock()
_models: OrderedDict[str, nn.Module] = OrderedDict()
_recordings: OrderedDict[Hashable, Recording] = OrderedDict()


def preview(params: RunParams) -> tuple[WrapPlan, Estimate]:
    """Return the plan of a run and its cost per rank. Needs no weights, no process group and no GPU."""
    return list(previews(params))[-1]


def previews(params: RunParams) -> Iterator[tuple[WrapPlan, Estimate]]:
    """Yield the plan and its cost: first without memory events unless they are known already, then with.

    The newest models and recordings are kept, since other choices change more often.
    """
    key = json.dumps(params.to_dict()["model"])
    with _building:  # transformers' lazy modules break when two threads import them
        if key not in _models:
            _models[key] = frozen_model(params.model)
        model = _models[key]
        if len(_models) > MAX_MODELS:
            _models.popitem(last=False)
    plan = plan_of(model, params)
    if plan.memory_events:  # AUTO has needed them
        yield plan, cost_of(plan, params)
        return
    recorded = (key, *_what_is_recorded(plan, params))
    if recorded not in _recordings:
        yield plan, cost_of(plan, params)
        if plan.refused:
            return
        _recordings[recorded] = record_memory(model, plan, example_of(model, params))
        if len(_recordings) > MAX_RECORDINGS:
            _recordings.popitem(last=False)
    plan = with_recording(plan, _recordings[recorded])
    yield plan, cost_of(plan, params)


def _what_is_recorded(plan: WrapPlan, params: RunParams) -> tuple[Hashable, ...]:
    """Return all but the model that a recording depends on: plans that are equal in it have the same memory events."""
    fsdp, units = plan.fsdp, []
    for unit in plan.units:
        dtypes = tuple((p.name, p.dtype, p.trainable) for p in unit.params)
        units.append((unit.modules, unit.order, unit.sharded, unit.compute_dtype, unit.grad_flow, dtypes))
    choices = plan.backend, fsdp.mixed_precision, fsdp.buffer_dtype, fsdp.activation_checkpointing
    return params.train.batch_size, params.data.max_length, *choices, *units


def check(params: RunParams) -> WrapPlan:
    """Check the data and the plan, and return the plan, for its warnings.

    Raises ParamError for data that cannot be read, for what cannot be planned, and for the lint's errors.
    """
    check_data(params.data)
    plan = next(previews(params))[0]
    plan.check()
    return plan


def frozen_model(params: ModelParams) -> nn.Module:
    """Build the model without weights, frozen as it will be trained."""
    model, _ = build_model(params, meta=True)
    freeze(model, params.freeze)
    return model


def plan_for(model: nn.Module, params: RunParams) -> tuple[WrapPlan, Estimate]:
    """Return the plan of a model that is frozen already, and its cost per rank."""
    plan = plan_of(model, params)
    if not (plan.refused or plan.memory_events):
        plan = with_memory_events(model, plan, example_of(model, params))
    return plan, cost_of(plan, params)


def plan_of(model: nn.Module, params: RunParams) -> WrapPlan:
    """Return the plan of a model that is frozen already, without its cost: enough for the lint."""
    # Only AUTO needs an example: its budget includes activations.
    example = example_of(model, params) if params.fsdp.frozen_policy is FrozenPolicy.AUTO else None
    train = params.train.change(accumulation=params.train.accumulation * len(params.data.sources()))
    return make_plan(model, params.fsdp, world_size=params.launch.ranks, example=example, train=train)


def cost_of(plan: WrapPlan, params: RunParams, *, machine: Machine | str | None = None) -> Estimate:
    """Return what a run's plan costs each rank; with a machine, also the seconds of a step."""
    return estimate(plan, params.train, sources=len(params.data.sources()), machine=machine)


def peak_of(params: RunParams, plan: WrapPlan, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the peak that the plan predicts for a micro-batch of a run: bytes, when, and the batch's shapes."""
    cost = cost_of(with_memory_events(frozen_model(params.model), plan, inputs), params)
    tensors = {"input_ids": inputs["input_ids"], **inputs["media"]}
    shapes = [f"{name} {' x '.join(map(str, tensor.shape))}" for name, tensor in tensors.items()]
    return {"bytes": cost.peak_bytes, "when": cost.peak_when, "batch": ", ".join(shapes)}


def example_of(model: nn.Module, params: RunParams) -> dict[str, Any]:
    """Return the largest inputs of a micro-step on the meta device, with a picture (sound, ...) per sample."""
    size, length = params.train.batch_size, params.data.max_length
    encoders = getattr(model, "encoders", None) or {"vision": model.vision_encoder}
    lead = {"vision": (size, 1, 1)}
    with torch.device("meta"):
        ids = torch.empty(size, length, dtype=torch.long)
        media = {key: torch.empty(*lead.get(key, (size, 1)), *encoders[key].item_shape) for key in encoders}
    return {"input_ids": ids, "attention_mask": ids, "labels": ids, "media": media}
