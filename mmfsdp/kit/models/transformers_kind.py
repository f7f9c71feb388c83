"""TransformersKind: a whole vision-language model of transformers, as from_transformers.py builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ...core.plan import WrapPlan
from ...params import GENERATED, ModelParams, ParamError, RunParams
from ..data.batch import IMAGE, Batch, Sample
from ..data.chat import BLANK, ChatProcessor
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from .backbones import forward_arguments
from .few_layers import json_values, shallow_config
from .from_transformers import build_vlm, check_calls, spell_out_parts, vlm_config
from .generated import resolve_generated
from .kinds import Built, Kind, check_room
from .weight_files import no_tensor_sources


class TransformersKind(Kind):
    """A vision-language model of transformers, with its own processor."""

    planned_with_example = True  # Mllama's projector is registered last and runs in between
    generated = ("model",)
    layouts = {
        "from_pretrained": "mmfsdp.kit.compat.export_vlm:WHOLE",
        "adapter": "mmfsdp.kit.compat.export_vlm:ADAPTER",
    }

    def build(self, params: ModelParams, *, meta: bool, download: bool, read: bool) -> Built:
        """Build the model by its name, its folder or its configuration."""
        whole = resolve_generated(params, "model", meta=not download)
        return Built(*build_vlm(whole, meta=meta, download=download, read=read))

    def is_built_whole(self, params: ModelParams) -> bool:
        """Return True if the model has random weights, or weights in other files than safetensors."""
        whole = resolve_generated(params, "model")
        return no_tensor_sources({"model": whole.weights or whole.name or None})

    def freeze_patterns(self, model: nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the patterns with vision, projector, language and lora spelled out."""
        return tuple(spell_out_parts(model, patterns))

    def example(
        self,
        model: nn.Module,
        params: RunParams,
        processor: SampleProcessor | None,
        sources: Mapping[str, Splits] | None = None,
    ) -> dict[str, Any] | None:
        """Return real inputs, since the model reads their values: of its processor, else as `model.picture` says."""
        return self.example_of_pictures(model, params, processor, 1)

    def example_of_pictures(
        self, model: nn.Module, params: RunParams, processor: SampleProcessor | None, pictures: int
    ) -> dict[str, Any] | None:
        """Return such inputs with so many pictures a sample."""
        size, length = params.train.batch_size, params.data.max_length
        if isinstance(processor, ChatProcessor):
            return _example_of_chat(processor, size, length, pictures)
        if not params.model.picture:
            return None
        return _example_of_picture(model, params.model.picture, size, length, pictures)

    def picture_tokens(self, model: nn.Module, params: RunParams, processor: SampleProcessor | None) -> int:
        """Return the tokens that a picture adds to a text."""
        if not isinstance(processor, ChatProcessor):
            return params.model.picture.get("tokens", 0)
        one, two = (_batch_of_chat(processor, 1, pictures).input_ids.shape[1] for pictures in (1, 2))
        return two - one

    def check_plan(self, model: nn.Module, plan: WrapPlan) -> None:
        """Raise ParamError where the number of a rank's collectives would depend on the pictures in its batch."""
        check_calls(model, plan)

    def few_layers(self, params: ModelParams, folder: Path) -> ModelParams:
        """Return them with few layers; one that has a processor, which is loaded from a folder, is written there."""
        if params.weights == GENERATED:
            return params
        shallow = params.change(config=shallow_config(json_values(vlm_config(params).to_dict())), weights=None)
        processor = self.build(params, meta=True, download=False, read=False).processor
        if processor is None:
            return shallow.change(name="")  # which would be looked for on the hub
        assert isinstance(processor, ChatProcessor)
        alone = shallow.change(name="", lora_rank=None, lora_targets=())
        source = folder / "model"
        self.build(alone, meta=False, download=True, read=False).model.save_pretrained(source)
        processor.processor.save_pretrained(source)
        return params.change(name=str(source), weights=None, config={})

    def generated_from(self, params: ModelParams) -> list[Any]:
        """Return the configuration."""
        return [params.config]


def _batch_of_chat(processor: ChatProcessor, size: int, pictures: int) -> Batch:
    """Return a batch of samples with so many pictures each, which is not cut."""
    side = processor.image_size
    image = Image.new("RGB", (side, side))
    sample = Sample.of(IMAGE * pictures, BLANK.text, (image,) * pictures, BLANK.name)
    return replace(processor, max_length=10**9)([sample] * size)


def _example_of_chat(processor: ChatProcessor, size: int, length: int, pictures: int) -> dict[str, Any]:
    """Return a batch of samples with so many pictures each, padded to the largest length."""
    side = processor.image_size
    batch = _batch_of_chat(processor, size, pictures)
    needed = batch.input_ids.shape[1]
    if needed > length:
        whose = "a picture" if pictures == 1 else f"{pictures} pictures"
        message = f"{length} is too short for {whose} of {side} x {side}: with the template it has {needed} tokens"
        raise ParamError("data.max_length", f"{message}; raise it")
    inputs = batch.inputs()
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == batch.input_ids.shape:
            inputs[key] = torch.cat([value, *[value[:, -1:]] * (length - needed)], dim=1)  # the last token again
        elif key == "position_ids":  # (3, B, L)
            inputs[key] = torch.cat([value, *[value[..., -1:]] * (length - needed)], dim=-1)
    return inputs


def _example_of_picture(model: Any, picture: dict[str, Any], size: int, length: int, pictures: int) -> dict[str, Any]:
    """Return a batch of samples with so many pictures, as `model.picture` describes what a processor makes of one."""
    tokens, arguments = picture.get("tokens", 0), forward_arguments(model)
    # A token of text stands between two pictures: models take neighbors for one.
    check_room(length, pictures * (tokens + 1) - 1, pictures)
    ids = torch.zeros(size, length, dtype=torch.long)
    for i in range(pictures):
        start = i * (tokens + 1)
        ids[:, start : start + tokens] = model.config.image_token_id
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    inputs["use_cache"] = False
    for key, value in picture.items():
        if key != "tokens" and key not in arguments:
            raise ParamError("model.picture", f"{key} is not an input of {type(model).__name__}; remove it")
        if isinstance(value, list):
            is_shape = isinstance(value[0], int)
            one = torch.ones(value) if is_shape else torch.tensor(value)
            # Grids and patches of all pictures stand in one list; where the first axis is the samples, the pictures of
            # a sample are along the second.
            inputs[key] = torch.cat([torch.cat([one] * pictures, dim=_axis_of_pictures(picture))] * size)
    for key in {"token_type_ids", "mm_token_type_ids"}.intersection(arguments):
        inputs[key] = (ids == model.config.image_token_id).long()
    if "cross_attention_mask" in arguments:
        inputs["cross_attention_mask"] = inputs["aspect_ratio_mask"][:, None].expand(-1, length, -1, -1)
    return inputs


def _axis_of_pictures(picture: dict[str, Any]) -> int:
    """Return the axis along which the pictures of a sample stand, in what `model.picture` describes."""
    shape = picture.get("pixel_values")
    return 1 if isinstance(shape, list) and len(shape) > 4 else 0
