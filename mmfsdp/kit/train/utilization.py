"""Utilization: MFU and HFU of a rank, by the FLOPs of its own batches and the peak of its card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.collectives import gather_json
from ...core.step_batch import StepBatch
from ...predict.cards import peak_of
from ..data.own_random import own_random
from .callbacks import Callback, Training

if TYPE_CHECKING:
    from ...predict.batch_work import BatchWork


class Utilization(Callback):
    """Adds `mfu`, `hfu` and `mfu_6n` to the row of a step, shares from 0 to 1.

    Each is FLOPs of this rank's micro-batches over the seconds of the step and the card's peak: those that the step
    needs, those that run, and 6 for each parameter and position, as for a language model that trains in full. A step
    with a batch whose FLOPs are not known has none of them.
    """

    def __init__(self, work: BatchWork, peak: float) -> None:
        """peak: FLOPs per second of this rank's card."""
        self.work, self.peak = work, peak
        self.steps_to_come: dict[int, dict[str, float]] = {}
        """FLOPs of the steps whose rows are still to come, by step: on a GPU a row comes after the next step began."""

    def around_step(self, step: int, micro_batches: list[StepBatch]) -> AbstractContextManager[None]:
        """Count the FLOPs of a step, before it begins: by the sizes of its batches alone."""
        self.steps_to_come[step] = self.flops(micro_batches)
        return nullcontext()

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Add the shares to the row."""
        for key, flops in self.steps_to_come.pop(row["step"], {}).items():
            row[key] = flops / row["step_s"] / self.peak

    def flops(self, micro_batches: Sequence[StepBatch]) -> dict[str, float]:
        """Return the FLOPs of a step by the key of a row; {} if those of a batch are not known."""
        needed = executed = of_6n = 0.0
        for batch in micro_batches:
            inputs = batch.inputs()
            flops = self.work.flops(inputs)
            if flops is None:
                return {}
            needed, executed = needed + flops.needed, executed + flops.executed
            of_6n += self.work.flops_6n(inputs)
        return {"mfu": needed, "hfu": executed, "mfu_6n": of_6n}


def training_utilization(training: Training) -> Utilization | None:
    """Return the callback of a training on GPUs, else None. Every rank must call it.

    None, too, on a card whose peak is not known, and for a model whose FLOPs are not.
    """
    if training.device.type != "cuda":
        return None
    from ...predict.batch_work import BatchWork  # with fake tensors, which ranks on CPUs do not need

    peak = peak_here(training)
    if not any(gather_json(peak is not None)):
        return None
    training.beat("taking up: counting FLOPs")
    counted = None
    if dist.get_rank() == 0:  # it takes seconds of a CPU, and is the same on all
        try:
            with own_random(0):  # the training's own random states stay as a resume has restored them
                work = batch_work(training)
            counted = work.to_dict() if work else None
        except Exception as error:  # the training goes on without
            print(f"MFU and HFU are not known: {type(error).__name__}: {error}"[:300])
    counted = gather_json(counted)[0]
    return Utilization(BatchWork.from_dict(counted), peak) if counted and peak else None


def peak_here(training: Training) -> float | None:
    """Return the peak of this rank's card, in the format that most of the model computes in; None if not known."""
    fp32 = training.plan.mostly_fp32
    try:
        # With TensorFloat-32 cards have another peak.
        if fp32 and torch.get_float32_matmul_precision() != "highest":
            return None
        return peak_of(torch.cuda.get_device_name(training.device), fp32=fp32)
    except Exception as error:  # such as torch's, where old and new settings of TensorFloat-32 are mixed
        print(f"MFU and HFU are not known: {type(error).__name__}: {error}"[:300])
        return None


def batch_work(training: Training) -> BatchWork | None:
    """Return the FLOPs of a training's batches; None if nobody knows an example of its inputs."""
    from ...predict.batch_work import BatchWork, traced
    from .prepare import example_of, frozen_model

    params, plan = training.setup.params, training.plan
    model, _ = frozen_model(params.model)  # the training's own is wrapped
    example = example_of(model, params, training.processor, training.sources)
    if example is None:
        return None
    if training.features is not None:
        example = with_features(model, example)
        flops = traced(model, plan, example)
        plan = replace(plan, flops=int(flops.needed), hardware_flops=int(flops.executed))
    return BatchWork.of(model, plan, example)


def with_features(model: nn.Module, example: dict[str, Any]) -> dict[str, Any]:
    """Return an example with the vision encoder's features in place of its pictures, as a feature cache gives them.

    model: on the meta device, as the example's pictures are.
    """
    features = model(media=example["media"], features_only=True).vision_features
    return {**example, "media": {"vision_features": features}}
