"""The model that parts train: on a GPU ViT-L/14 with the layout of Llama-3.2-1B, as in `mmfsdp bench step`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.bench.bench_models import Method, copy_to, flamingo_batch, model_params, random_model
from mmfsdp.kit.bench.bench_step import LARGE, batch_for
from mmfsdp.kit.data.batch import Batch
from mmfsdp.kit.train.optimizer import LocalAdamW
from mmfsdp.params import FSDPParams, RunParams, TrainParams, load
from mmfsdp.planning import make_plan
from mmfsdp.predict import Machine, estimate, machine_of, step_time
from mmfsdp.predict.cards import card_of
from tests.bench.gpu.device import DEVICE, ON_GPU, SHARDS_INTEGERS, copy_rate, matrix_rate

TRAIN = TrainParams(device=DEVICE.type)


def run_params() -> RunParams:
    """Return the parameters of the run whose step is measured."""
    return load("clip_llama_1b").change(**LARGE) if ON_GPU else load("tiny")


@cache
def pristine() -> nn.Module:
    """Return the model with random weights. Wrap copies of it: drawing billions of numbers takes long.

    It stays in main memory, so that each row has the GPU's for itself.
    """
    return random_model(run_params().model)


@cache
def batch_of(samples: int, *, mask: bool) -> Batch:
    """Return samples of a picture and text each, in pinned memory as the loader's are."""
    params = run_params().change(**{"train.batch_size": samples})
    return as_loaded(batch_for(params, pristine(), rank=0), mask=mask)  # type: ignore[arg-type]


def as_loaded(batch: Batch, *, mask: bool) -> Batch:
    """Return the batch as the loader hands it over, with a mask of ones or without."""
    if not mask:
        batch = replace(batch, attention_mask=None)
    return batch.pin_memory() if ON_GPU else batch


@cache
def small_model() -> nn.Module:
    """Return a Flamingo of two layers, of which a step takes few kernels. Wrap copies of it."""
    return random_model(model_params(256 if ON_GPU else 64, layers=2))


def small_batch(*, mask: bool = False) -> Batch:
    """Return two samples for it."""
    return as_loaded(flamingo_batch(seed=0), mask=mask)


def plan_of(model: nn.Module, batch: Batch, fields: dict[str, Any]) -> WrapPlan:
    """Return the plan of FSDP fields for so many ranks as there are."""
    return make_plan(model, FSDPParams(**fields), world_size=dist.get_world_size(), example=batch.inputs(), train=TRAIN)


def quantized(form: str) -> dict[str, Any]:
    """Return the FSDP fields of frozen matrices in int8 or nf4."""
    fields = {"mixed_precision": "bf16", "frozen_dtype": form}
    return fields if SHARDS_INTEGERS else fields | {"backend": "DDP"}


def wrap(model: nn.Module, plan: WrapPlan) -> Method:
    """Move the model to the device, and wrap it."""
    wrapped = apply_plan(copy_to(model, DEVICE), plan, device=DEVICE)
    return Method(wrapped, LocalAdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4, fused=True))


def here() -> Machine:
    """Return the published figures of this GPU; of one that has none, the measured ones."""
    name = torch.cuda.get_device_name(DEVICE) if ON_GPU else ""
    card = card_of(name)
    known = {
        "H100": "h100-nvlink",
        "H200": "h200-nvlink",
        "GH200": "gh200-nvlink",
        "B200": "b200-nvlink",
        "A100 80 GB": "a100-nvlink",
        "A100 40 GB": "a100-40-nvlink",
        "L40S": "l40s-pcie",
        "RTX 4090": "rtx4090-pcie",
    }
    if card and card.name in known:
        return machine_of(known[card.name])
    figures = {"flops": matrix_rate(), "products": 1.0, "attention": 0.65, "memory": copy_rate()}
    return machine_of("a100-nvlink", figures)


def predicted(plan: WrapPlan, *, peak: float, seconds: float) -> dict[str, Any]:
    """Return the prediction beside a measured peak in bytes and the seconds of a step."""
    predicted_peak = estimate(plan, TRAIN).peak_bytes or 0
    row: dict[str, Any] = {"predicted peak / measured": predicted_peak / peak}
    if ON_GPU:  # no CPU is among the machines
        row["predicted to be free GB"] = here().needed_bytes(predicted_peak) / 1e9
        times = step_time(plan, TRAIN, machine=here())
        row |= {"predicted s": times.overlapped, "to s": times.slowest, "usual s / measured": times.usual / seconds}
        row["seconds in range"] = times.overlapped <= seconds <= times.slowest
    return row
