"""build_model: from ModelParams to a model and the processor of its samples."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core.freeze import FreezeReport, freeze
from ..data.multimodal import MultimodalProcessor, add_placeholders
from ..data.processor import Processor, SampleProcessor
from ..data.shapes import word_tokenizer
from ..params import GENERATED, BackboneParams, ModelKind, ModelParams, ParamError
from .backbones import add_lora, build_language, load_tokenizer
from .base import MediaModel
from .encoders import AudioEncoder, VisionEncoder, build_audio, build_vision
from .flamingo import Flamingo
from .from_transformers import build_vlm, open_vlm, spell_out_parts
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import TokenIds, check_tokens, saved_new_tokens
from .weights import TensorSource, Weights, tensor_sources

RECIPE_VERSION = 1
"""Raise it when the generated pictures or their pretraining change: backbones of older versions are then not used."""


def build_model(params: ModelParams, *, meta: bool = False) -> tuple[Any, SampleProcessor | None]:
    """Return the model of `params` and its processor. All parameters are trainable until `freeze`.

    With `meta`, parameters are on the meta device and nothing is downloaded. The processor is None if there is no
    tokenizer: for a language model without name and weights or, with `meta`, one that is not in a folder. New parts are
    initialized from torch's random state. Raises ParamError naming the field that is wrong.
    """
    if params.kind is ModelKind.TRANSFORMERS:
        return build_vlm(resolve_generated(params, "model", meta), meta=meta)
    vision_params = resolve_generated(params, "vision", meta)
    language_params = resolve_generated(params, "language", meta)
    backbones = _Backbones(
        build_vision(vision_params, meta=meta),
        build_language(language_params, meta=meta),
        [build_audio(audio, meta=meta) for audio in params.encoders],
        _tokenizer(language_params, meta),
    )
    if backbones.tokenizer is None and params.language.weights == GENERATED:
        # Not pretrained yet, but the words are known. If the table is too small, pretraining says so.
        tokenizer, table = word_tokenizer(close=False), backbones.language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        backbones.tokenizer = tokenizer if len(tokenizer) <= table.num_embeddings else None
    return _join(params, backbones, meta)


def open_model(params: ModelParams, *, read: bool = True) -> tuple[Any, SampleProcessor | None, Weights | None]:
    """Return the model of `params` on the meta device, its processor, and its weights to be read one by one.

    Weights are None without `read`, and if a backbone has no safetensors files with the names of its tensors: then only
    `build_model` can load them. Raises ParamError as it does, and for a damaged file or a wrong shape.
    """
    if params.kind is ModelKind.TRANSFORMERS:
        return open_vlm(resolve_generated(params, "model"), read=read)
    vision_params, language_params = resolve_generated(params, "vision"), resolve_generated(params, "language")
    backbones = _Backbones(
        build_vision(vision_params, meta=True),
        build_language(language_params, meta=True),
        [build_audio(audio, meta=True) for audio in params.encoders],
        _tokenizer(language_params, meta=False),
    )
    sources: list[TensorSource] | None = None
    if read:
        modules = {
            "vision": (backbones.vision.visual, vision_params),
            "language": (backbones.language, language_params),
        }
        for i, (encoder, audio_params) in enumerate(zip(backbones.audio, params.encoders, strict=True)):
            modules[f"encoders.{i}"] = (encoder.audio, audio_params)
        sources = _sources_of_all(modules)
    model, processor = _join(params, backbones, meta=True)
    if sources is None:
        return model, processor, None
    try:
        return model, processor, Weights(model, sources)
    except LookupError:
        return model, processor, None


def _sources_of_all(modules: dict[str, tuple[nn.Module, BackboneParams]]) -> list[TensorSource] | None:
    """Return the sources of all backbones' tensors, or None if one of them has none."""
    sources: list[TensorSource] = []
    for field, (module, backbone) in modules.items():
        own = tensor_sources(module, backbone.weights, field)
        if not own:
            return None
        sources += own
    return sources


@dataclass
class _Backbones:
    """The parts of a model that are loaded; audio is in the order of `ModelParams.encoders`."""

    vision: VisionEncoder
    language: PreTrainedModel
    audio: list[AudioEncoder]
    tokenizer: Any


def _join(params: ModelParams, backbones: _Backbones, meta: bool) -> tuple[MediaModel, Processor | None]:
    """Return a model of its backbones, and its processor."""
    if backbones.tokenizer is not None:
        backbones.language.generation_config.eos_token_id = backbones.tokenizer.eos_token_id
    if params.kind is ModelKind.MULTIMODAL:
        return _multimodal(params, backbones, meta)
    return _flamingo(params, backbones)


def _flamingo(params: ModelParams, backbones: _Backbones) -> tuple[Flamingo, Processor | None]:
    vision, language, tokenizer = backbones.vision, backbones.language, backbones.tokenizer
    processor = None
    if tokenizer is None:
        table = language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        tokens = TokenIds.after(table.num_embeddings)
    else:
        known = len(tokenizer) - saved_new_tokens(language)
        processor = Processor(tokenizer, vision.image_size, vision.mean, vision.std)
        tokens = TokenIds(
            image=processor.image_id,
            end_of_chunk=processor.end_id,
            pad=processor.pad_id,
            known=known,
            new=len(tokenizer) - known,
        )
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


def _multimodal(params: ModelParams, backbones: _Backbones, meta: bool) -> tuple[MultimodalModel, Processor | None]:
    vision, language, tokenizer = backbones.vision, backbones.language, backbones.tokenizer
    resampler = {
        "num_latents": params.num_latents,
        "depth": params.perceiver_depth,
        "heads": params.attention_heads,
        "head_dim": params.attention_head_dim,
    }
    encoders = {"vision": ModalEncoder(vision, params.projector, resampler)}
    audio_shape: tuple[int, ...] = ()
    for audio_params, audio in zip(params.encoders, backbones.audio, strict=True):
        encoders[audio_params.modality.value] = ModalEncoder(audio, audio_params.projector, resampler)
        audio_shape = audio.item_shape
    if params.lora_rank:
        add_lora(language, params.lora_rank, targets=params.lora_targets, meta=meta)
    if tokenizer is None:
        return MultimodalModel(encoders, language), None
    placeholders = add_placeholders(tokenizer, encoders)
    check_tokens(language, len(tokenizer) - len(placeholders))  # which need no rows
    model = MultimodalModel(encoders, language, placeholders=placeholders)
    model.tokens = replace(model.tokens, end_of_chunk=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    processor = MultimodalProcessor(
        tokenizer, vision.image_size, vision.mean, vision.std, counts=model.num_tokens, audio_shape=audio_shape
    )
    return model, processor


def _tokenizer(params: BackboneParams, meta: bool) -> Any:
    """Return the language model's tokenizer, or None if it has none or, with `meta`, none in a folder."""
    sources = [source for source in (params.weights, params.name) if source]
    if not sources or (meta and not any(Path(source).is_dir() for source in sources)):
        return None
    return load_tokenizer(params)


def freeze_model(model: nn.Module, params: ModelParams) -> FreezeReport:
    """Freeze a model that was built from `params` as `params.freeze` says. Raises ParamError as `freeze` does."""
    if params.kind is ModelKind.TRANSFORMERS:
        return freeze(model, spell_out_parts(model, params.freeze))
    return freeze(model, params.freeze)


def generated_folder(params: ModelParams) -> Path:
    """Return the folder of the backbones that are pretrained on generated pictures, one per configuration.

    It is under $MMFSDP_CACHE or the user's cache folder and holds `vision/` in open_clip's layout and `language/` in
    transformers', or a whole model of transformers. Raises ParamError for a user without a home.
    """
    parts: list[Any] = [[str(part.source), part.name, part.config] for part in (params.vision, params.language)]
    if params.kind is ModelKind.TRANSFORMERS:
        parts = [params.config]
    text = json.dumps([RECIPE_VERSION, parts], sort_keys=True)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = os.environ.get("MMFSDP_CACHE") or os.path.join(cache, "mmfsdp")
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):
        raise ParamError("MMFSDP_CACHE", f"{folder!r}: there is no such home; set it to a folder that you can write")
    return Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]


def needs_backbones(params: ModelParams) -> bool:
    """Return whether generated weights are wanted and not there yet."""
    if params.kind is ModelKind.TRANSFORMERS:
        return params.weights == GENERATED and not generated_folder(params).is_dir()
    for part in ("vision", "language"):
        if getattr(params, part).weights == GENERATED and not (generated_folder(params) / part).is_dir():
            return True
    return False


def resolve_generated(params: ModelParams, part: str, meta: bool = False) -> Any:
    """Return a backbone's parameters, or the model's, with the folder of the weights instead of `generated`.

    With `meta`, weights that are not there yet become None; otherwise they raise ParamError.
    """
    backbone = params if part == "model" else getattr(params, part)
    if backbone.weights != GENERATED:
        return backbone
    folder = generated_folder(params)
    if part != "model":
        folder = folder / part
    if not folder.is_dir() and not meta:
        raise ParamError(
            f"{part}.weights",
            f"generated weights are not in {folder} yet; run `mmfsdp run`, which pretrains them first, or call "
            "mmfsdp.train.pretrain.ensure_backbones(params)",
        )
    return backbone.change(weights=str(folder) if folder.is_dir() else None)
