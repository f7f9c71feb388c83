"""BackbonesKind: kinds that are put together from a vision encoder and a language model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...params import GENERATED, BackboneParams, BackboneSource, ModelParams, RunParams
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from .backbones import build_language, load_config, load_tokenizer
from .encoders import VisionEncoder, build_vision
from .few_layers import LAYERS, json_values, shallow_config
from .fused_norms import fuse_norms
from .fused_swiglu import fuse_swiglu
from .generated import resolve_generated
from .kinds import Built, Kind, check_room
from .loss_in_head import loss_in_head
from .media_model import MediaModel
from .weight_files import no_tensor_sources, tensor_sources


class BackbonesKind(Kind):
    """A model around a vision encoder and a language model, which are built by themselves."""

    generated = ("vision", "language")
    layouts = {"from_pretrained": "mmfsdp.kit.compat.export:OURS"}

    @abstractmethod
    def assemble(
        self, params: ModelParams, vision: VisionEncoder, language: PreTrainedModel, tokenizer: Any, *, meta: bool
    ) -> tuple[MediaModel, SampleProcessor | None]:
        """Return the model around its two backbones, and its processor; without a tokenizer None."""

    def build(self, params: ModelParams, *, meta: bool, download: bool, read: bool) -> Built:
        """Build both backbones, then the model around them."""
        vision_params = resolve_generated(params, "vision", meta=not download)
        language_params = resolve_generated(params, "language", meta=not download)
        vision = build_vision(vision_params, meta=meta)
        language = build_language(language_params, meta=meta)
        sources = None
        if read:
            # Before the model is built around them: their tensors have the names of the files.
            of_vision = tensor_sources(vision.visual, vision_params.weights, "vision")
            of_language = tensor_sources(language, language_params.weights, "language")
            if of_vision and of_language:
                sources = of_vision + of_language
        tokenizer = _tokenizer(params, language_params, language, download=download)
        if tokenizer is not None:
            language.generation_config.eos_token_id = tokenizer.eos_token_id
        model, processor = self.assemble(params, vision, language, tokenizer, meta=meta)
        if params.loss_in_head:
            loss_in_head(model)
        if params.fused_norms:
            fuse_norms(model)
        if params.fused_swiglu:
            fuse_swiglu(model)
        if processor is not None:
            processor.gives_loss_positions = not model.whole_logits
        return Built(model, processor, sources)

    def is_built_whole(self, params: ModelParams) -> bool:
        """Return True if one of the backbones has random weights, or weights in other files than safetensors."""
        parts = {part: resolve_generated(params, part) for part in self.generated}
        return no_tensor_sources({part: backbone.weights for part, backbone in parts.items()})

    def example(
        self,
        model: nn.Module,
        params: RunParams,
        processor: SampleProcessor | None,
        sources: Mapping[str, Splits] | None = None,
    ) -> dict[str, Any]:
        """Return texts of the greatest length on the meta device; without padding, a batch has no mask."""
        return self.example_of_pictures(model, params, processor, 1)

    def example_of_pictures(
        self, model: nn.Module, params: RunParams, processor: SampleProcessor | None, pictures: int
    ) -> dict[str, Any]:
        """Return such texts with so many pictures each."""
        size, length = params.train.batch_size, params.data.max_length
        encoder: Any = model.get_submodule(self.vision_encoder)
        if pictures > 1:
            check_room(length, pictures * len(self.picture_ids(model)), pictures)
        with torch.device("meta"):
            ids = torch.empty(size, length, dtype=torch.long)
            media = {"vision": torch.empty(size, pictures, 1, *encoder.item_shape)}
        return {"input_ids": ids, "labels": ids, "media": media}

    def few_layers(self, params: ModelParams, folder: Path) -> ModelParams:
        """Return them with few layers in both backbones and between them; generated ones, which are small, stay."""
        if GENERATED in (params.vision.weights, params.language.weights):
            return params
        processor = self.build(params, meta=True, download=False, read=False).processor
        shallow = params.change(
            vision=_shallow_backbone(params.vision, "vision"),
            language=_shallow_backbone(params.language, "language"),
            cross_attention_every=min(params.cross_attention_every, LAYERS),
            perceiver_depth=min(params.perceiver_depth, LAYERS),
        )
        return shallow.change(**{"language.name": ""}) if processor is None else shallow

    def generated_from(self, params: ModelParams) -> list[Any]:
        """Return the configurations of both backbones."""
        return [[str(part.source), part.name, part.config] for part in (params.vision, params.language)]


def _tokenizer(
    params: ModelParams, language_params: BackboneParams, language: PreTrainedModel, *, download: bool
) -> Any:
    """Return the language model's tokenizer; None if it has none, or none here and it may not be fetched."""
    places = [place for place in (language_params.weights, language_params.name) if place]
    if places and (download or any(Path(place).is_dir() for place in places)):
        return load_tokenizer(language_params)
    if params.language.weights == GENERATED:
        from ..shapes.texts import word_tokenizer

        # Not pretrained yet, but the words are known. If the table is too small, pretraining says so.
        words, table = word_tokenizer(close=False), language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return words if len(words) <= table.num_embeddings else None
    return None


def _shallow_backbone(params: BackboneParams, field: str) -> BackboneParams:
    """Return a backbone with few layers and random weights; its name stays, for the tokenizer."""
    if params.source is BackboneSource.OPEN_CLIP:
        from .open_clip_towers import open_clip_config  # late, as in build_vision

        return params.change(config=shallow_config(json_values(open_clip_config(params))), weights=None)
    config = json_values(load_config(params, field).to_dict())
    name = params.name or params.weights or ""
    return params.change(config=shallow_config(config), weights=None, name=name)
