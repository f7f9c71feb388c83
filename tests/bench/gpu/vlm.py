"""Measure a step of a vision-language model of transformers, with random weights, at the largest batches that fit."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import TrainParams
from tests import families
from tests.bench.gpu.device import DEVICE, ON_GPU, synchronize
from tests.bench.gpu.flamingo import plan_of, predicted, quantized
from tests.bench.gpu.methods import shares
from tests.bench.gpu.rows import Rows
from tests.bench.gpu.waits import counts, noted_waits

QWEN_3B = {
    "text_config": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
    "tie_word_embeddings": True,
}
"""Qwen2.5-VL-3B-Instruct's sizes: huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct, config.json."""
BF16 = {"mixed_precision": "bf16", "frozen_dtype": "bf16"}
RECOMPUTED = {"activation_checkpointing": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16, recomputed": BF16 | RECOMPUTED,
    "nf4, recomputed": quantized("nf4") | RECOMPUTED,
}
TOKENS, PICTURE_TOKENS, PATCHES = 512, 64, 256
"""Of a sample: a picture of 16 x 16 patches, four of which make a token, and text."""


def vlm(rows: Rows) -> None:
    """Write a row for each format and size of batch."""
    for samples in (16, 32) if ON_GPU else (2,):  # logits of 152,000 words: 64 samples would take 60 GB
        for way, fields in WAYS.items():
            if fields is not BF16 and not ON_GPU:
                continue
            if rows.seconds_left > (12 if ON_GPU else 0):
                rows.attempt({"way": way, "samples": samples}, partial(step_of, fields, samples))


def step_of(fields: dict[str, Any], samples: int) -> dict[str, Any]:
    """Return the rate of a step, with what was predicted beside it."""
    model, inputs = qwen(samples) if ON_GPU else tiny_qwen()
    for name, p in model.named_parameters():
        p.requires_grad_("merger" in name)
    plan = plan_of(model, Inputs(inputs), fields)
    model = apply_plan(model, plan, device=DEVICE)
    optimizer, _ = build_optimizer(model, TrainParams())
    times = []
    for number in range(4):
        if ON_GPU and number == 2:  # the optimizer's states exist then
            torch.cuda.reset_peak_memory_stats(DEVICE)
        synchronize()
        start = time.perf_counter()
        train_step(model, [inputs], optimizer)
        synchronize()
        times.append(time.perf_counter() - start)
    seconds = median(times[1:])
    row = {"s": seconds, "samples/s": samples / seconds} | shares(plan, seconds)
    if ON_GPU:
        peak = torch.cuda.max_memory_allocated(DEVICE)
        row["peak GB"] = peak / 1e9
        row |= predicted(plan, peak=peak, seconds=seconds)
    with noted_waits() as places:
        train_step(model, [inputs], optimizer)
    return row | counts(places)


class Inputs:
    """Inputs of a model of transformers as `plan_of` takes them."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self._inputs = inputs

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the forward."""
        return self._inputs


def qwen(samples: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of Qwen2.5-VL-3B's sizes on the GPU, and its inputs in pinned memory."""
    config = transformers.CONFIG_MAPPING["qwen2_5_vl"](**QWEN_3B)
    with DEVICE:
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(1000, (samples, TOKENS))
    ids[:, :PICTURE_TOKENS] = config.image_token_id
    is_picture = ids == config.image_token_id
    inputs = {"input_ids": ids, "labels": ids.masked_fill(is_picture, -100), "mm_token_type_ids": is_picture.long()}
    inputs["pixel_values"] = torch.randn(samples * PATCHES, 1176)
    inputs["image_grid_thw"] = torch.tensor([[1, 16, 16]] * samples)
    return model, {name: tensor.pin_memory() for name, tensor in inputs.items()}


def tiny_qwen() -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of the same family, and its inputs, for a CPU."""
    return families.build("qwen2_5_vl"), families.Inputs("qwen2_5_vl").inputs()
