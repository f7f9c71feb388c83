"""build_model: from ModelParams to a model and the processor that feeds it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .data.multimodal import MultimodalProcessor, add_placeholders
from .data.processor import Processor
from .data.words import word_tokenizer
from .models import (
    AudioEncoder,
    Flamingo,
    MediaModel,
    ModalEncoder,
    MultimodalModel,
    TokenIds,
    VisionEncoder,
    Weights,
    build_audio,
    build_language,
    build_vision,
    kept_tokens,
    load_tokenizer,
    origins,
)
from .params import GENERATED, BackboneParams, ModelKind, ModelParams, ParamError
from .places import cache_folder

RECIPE = 1
"""Raise it when the generated pictures or their pretraining change: what older versions pretrained is then left."""


def build_model(params: ModelParams, *, meta: bool = False) -> tuple[MediaModel, Processor | None]:
    """The model of `params` and its processor. Everything is trainable: `freeze` comes after.

    With `meta` parameters have shapes only and nothing is downloaded. The processor is None where there is no
    tokenizer: for a language model without name and weights, or, with `meta`, one that is not in a folder. New parts
    start from torch's random state. Raises ParamError naming the field that is wrong.
    """
    vision_params, language_params = (found_backbone(params, part, meta) for part in ("vision", "language"))
    vision = build_vision(vision_params, meta=meta)
    language = build_language(language_params, meta=meta)
    tokenizer = _tokenizer(language_params, meta)
    if tokenizer is None and params.language.weights == GENERATED:  # not pretrained yet, but its words are known
        words, table = word_tokenizer(close=False), language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        tokenizer = words if len(words) <= table.num_embeddings else None  # too small: pretraining refuses it by name
    return _joined(params, vision, language, tokenizer, _encoders(params, meta), meta)


def open_model(params: ModelParams, *, read: bool = True) -> tuple[MediaModel, Processor | None, Weights | None]:
    """As `build_model`, but on the meta device, and with what hands out its weights one by one.

    That is None without `read`, and where a backbone has no safetensors files, or names in them that only its library
    can read: then `build_model` must hold the weights whole. Raises ParamError as it does, and for a damaged file or a
    wrong shape.
    """
    parts = [*(found_backbone(params, part) for part in ("vision", "language")), *params.encoders]
    vision, language = build_vision(parts[0], meta=True), build_language(parts[1], meta=True)
    encoders = _encoders(params, meta=True)
    modules = [vision.visual, language, *(encoder.audio for encoder in encoders)]
    fields = ["vision", "language", *(f"encoders.{i}" for i in range(len(encoders)))]
    known = [origins(m, p.weights, field) if read else None for m, p, field in zip(modules, parts, fields, strict=True)]
    model, processor = _joined(params, vision, language, _tokenizer(parts[1], False), encoders, True)
    try:
        weights = Weights(model, [o for part in known for o in part or ()]) if all(known) else None
    except LookupError:
        weights = None
    return model, processor, weights


def _joined(
    params: ModelParams,
    vision: VisionEncoder,
    language: PreTrainedModel,
    tokenizer: Any,
    encoders: list[AudioEncoder],
    meta: bool,
) -> tuple[MediaModel, Processor | None]:
    """The model of its parts, and its processor."""
    if tokenizer is not None:
        language.generation_config.eos_token_id = tokenizer.eos_token_id
    if params.kind is ModelKind.MULTIMODAL:
        return _multimodal(params, vision, language, tokenizer, encoders, meta)
    processor, tokens = _processor(language, vision, tokenizer)
    model = Flamingo(
        vision,
        language,
        tokens=tokens,
        cross_attention_every=params.cross_attention_every,
        cross_attend_all=params.cross_attend_all,
        num_latents=params.num_latents,
        perceiver_depth=params.perceiver_depth,
        attention_heads=params.attention_heads,
        attention_head_dim=params.attention_head_dim,
        max_images=params.max_images,
        max_frames=params.max_frames,
        decoder_layers_name=params.decoder_layers,
    )
    return model, processor


def generated_folder(params: ModelParams) -> Path:
    """Where the backbones that are pretrained on generated pictures are kept: `vision/` as open_clip lays a model out,
    `language/` as transformers does. One folder per configuration, under $MMFSDP_CACHE or the user's cache folder.
    """
    parts = [[str(part.source), part.name, part.config] for part in (params.vision, params.language)]
    what = json.dumps([RECIPE, parts], sort_keys=True)
    return cache_folder() / hashlib.sha256(what.encode()).hexdigest()[:16]


def needs_backbones(params: ModelParams) -> bool:
    """True if generated weights are wanted and not there yet."""
    parts = [part for part in ("vision", "language") if getattr(params, part).weights == GENERATED]
    return any(not (generated_folder(params) / part).is_dir() for part in parts)


def found_backbone(params: ModelParams, part: str, meta: bool = False) -> BackboneParams:
    """The backbone's parameters, with the folder in place of the weights `generated`."""
    backbone: BackboneParams = getattr(params, part)
    if backbone.weights != GENERATED:
        return backbone
    folder = generated_folder(params) / part
    if not folder.is_dir() and not meta:
        raise ParamError(
            f"{part}.weights",
            f"generated weights are not in {folder} yet; run `mmfsdp run`, which pretrains them first, or call "
            "mmfsdp.pretrain.ensure_backbones(params)",
        )
    return replace(backbone, weights=str(folder) if folder.is_dir() else None)


def _tokenizer(params: BackboneParams, meta: bool) -> Any:
    """The language model's tokenizer, where it has one that is at hand."""
    places = [place for place in (params.weights, params.name) if place]
    if not places or (meta and not any(Path(place).is_dir() for place in places)):
        return None
    return load_tokenizer(params)


def _processor(language: PreTrainedModel, vision: VisionEncoder, tokenizer: Any) -> tuple[Processor | None, TokenIds]:
    """A Flamingo's processor, where there is a tokenizer, and the ids of the tokens that it has added."""
    if tokenizer is None:
        table = language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return None, TokenIds.after(table.num_embeddings)
    known = len(tokenizer) - kept_tokens(language)
    processor = Processor(tokenizer, vision.image_size, vision.mean, vision.std)
    ids = {"image": processor.image_id, "end_of_chunk": processor.end_id, "pad": processor.pad_id}
    return processor, TokenIds(**ids, known=known, new=len(tokenizer) - known)


def _encoders(params: ModelParams, meta: bool) -> list[AudioEncoder]:
    return [build_audio(one, meta=meta) for one in params.encoders]


def _multimodal(
    params: ModelParams,
    vision: VisionEncoder,
    language: PreTrainedModel,
    tokenizer: Any,
    encoders: list[AudioEncoder],
    meta: bool,
) -> tuple[MultimodalModel, Processor | None]:
    resampler = {
        "num_latents": params.num_latents,
        "depth": params.perceiver_depth,
        "heads": params.attention_heads,
        "head_dim": params.attention_head_dim,
    }
    parts = {"vision": ModalEncoder(vision, params.projector, resampler)}
    for one, encoder in zip(params.encoders, encoders, strict=True):
        parts[one.modality.value] = ModalEncoder(encoder, one.projector, resampler)
    if params.lora_rank:
        add_lora(language, params.lora_rank, meta=meta)
    placeholders = None if tokenizer is None else add_placeholders(tokenizer, parts)
    model = MultimodalModel(parts, language, placeholders=placeholders)
    if tokenizer is None:
        return model, None
    model.tokens = replace(model.tokens, end_of_chunk=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    audio: Any = parts["audio"].encoder.item_shape if "audio" in parts else ()
    looks = (vision.image_size, vision.mean, vision.std)
    return model, MultimodalProcessor(tokenizer, *looks, counts=model.num_tokens, audio_shape=audio)


def add_lora(language: PreTrainedModel, rank: int, *, meta: bool = False) -> None:
    """LoRA adapters (Hu et al. 2021) beside all matrices but the output's, in place, by peft; at first, a no-op.
    Raises ParamError where peft is missing."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ParamError("lora_rank", f"{rank} needs peft; pip install 'mmfsdp[lora]', or remove it") from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    inject_adapter_in_model(config, language, low_cpu_mem_usage=meta)
