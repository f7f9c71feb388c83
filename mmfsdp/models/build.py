"""build_model: from ModelParams to a model and the processor of its samples."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core.freeze import FreezeReport, freeze
from ..data.processor import MultimodalProcessor, Processor, SampleProcessor, add_placeholder
from ..data.shapes import word_tokenizer
from ..params import GENERATED, ModelKind, ModelParams, ParamError
from .backbones import add_lora, build_language, is_causal, load_tokenizer
from .encoders import VisionEncoder, build_vision
from .flamingo import Flamingo
from .from_transformers import build_vlm, spell_out_parts
from .multimodal import ModalEncoder, MultimodalModel
from .tokens import TokenIds, check_tokens, saved_new_tokens
from .weight_files import TensorSource, Weights, tensor_sources

RECIPE_VERSION = 1
"""Raise it when the generated pictures or their pretraining change: backbones of older versions are then not used."""
SHIPPED = Path(__file__).parent.parent / "shapes/backbones"
"""Backbones that come with the package, in folders named as in the cache; `train/make_backbones.py` makes them."""


def build_model(params: ModelParams, *, meta: bool = False) -> tuple[Any, SampleProcessor | None]:
    """Return the model of `params` and its processor. All parameters are trainable until `freeze`.

    With `meta`, parameters are on the meta device and nothing is downloaded. The processor is None if there is no
    tokenizer: for a language model without name and weights or, with `meta`, one that is not in a folder. New parts are
    initialized from torch's random state. Raises ParamError naming the field that is wrong.
    """
    model, processor, _ = _build(params, meta=meta, download=not meta, read=False)
    return model, processor


def open_model(params: ModelParams, *, read: bool = True) -> tuple[Any, SampleProcessor | None, Weights | None]:
    """Return the model of `params` on the meta device, its processor, and its weights to be read one by one.

    Weights are None without `read`, and if a backbone has no safetensors files with the names of its tensors: then only
    `build_model` can load them. Raises ParamError as it does, and for a damaged file or a wrong shape.
    """
    model, processor, sources = _build(params, meta=True, download=True, read=read)
    try:
        return model, processor, Weights(model, sources) if sources else None
    except LookupError:
        return model, processor, None


def _build(
    params: ModelParams, *, meta: bool, download: bool, read: bool
) -> tuple[Any, SampleProcessor | None, list[TensorSource] | None]:
    """Return a model, its processor and, with `read`, the sources of its backbones' tensors."""
    if params.kind is ModelKind.TRANSFORMERS:
        whole = resolve_generated(params, "model", meta=not download)
        return build_vlm(whole, meta=meta, download=download, read=read)
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
    tokenizer: Any = None
    places = [place for place in (language_params.weights, language_params.name) if place]
    if places and (download or any(Path(place).is_dir() for place in places)):
        tokenizer = load_tokenizer(language_params)
    elif params.language.weights == GENERATED:
        # Not pretrained yet, but the words are known. If the table is too small, pretraining says so.
        words, table = word_tokenizer(close=False), language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        tokenizer = words if len(words) <= table.num_embeddings else None
    if tokenizer is not None:
        language.generation_config.eos_token_id = tokenizer.eos_token_id
    if params.kind is ModelKind.MULTIMODAL:
        return *_multimodal(params, vision, language, tokenizer, meta), sources
    return *_flamingo(params, vision, language, tokenizer), sources


def _flamingo(
    params: ModelParams, vision: VisionEncoder, language: PreTrainedModel, tokenizer: Any
) -> tuple[Flamingo, Processor | None]:
    processor = None
    if tokenizer is None:
        table = language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        tokens = TokenIds.after(table.num_embeddings)
    else:
        known = len(tokenizer) - saved_new_tokens(language)
        mask_padding = not is_causal(language)
        processor = Processor(tokenizer, vision.image_size, vision.mean, vision.std, mask_padding=mask_padding)
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
        decoder_layers_name=params.decoder_layers,
    )
    return model, processor


def _multimodal(
    params: ModelParams, vision: VisionEncoder, language: PreTrainedModel, tokenizer: Any, meta: bool
) -> tuple[MultimodalModel, Processor | None]:
    encoders = {"vision": ModalEncoder(vision, params.projector)}
    if params.lora_rank:
        add_lora(language, params.lora_rank, targets=params.lora_targets, meta=meta)
    if tokenizer is None:
        return MultimodalModel(encoders, language), None
    placeholder = add_placeholder(tokenizer)
    check_tokens(language, len(tokenizer) - 1)  # the placeholder needs no row
    model = MultimodalModel(encoders, language, placeholders={"vision": placeholder})
    model.tokens = replace(model.tokens, end_of_chunk=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    processor = MultimodalProcessor(
        tokenizer,
        vision.image_size,
        vision.mean,
        vision.std,
        picture_tokens=model.num_tokens["vision"],
        mask_padding=not is_causal(language),
    )
    return model, processor


def freeze_model(model: nn.Module, params: ModelParams) -> FreezeReport:
    """Freeze a model that was built from `params` as `params.freeze` says. Raises ParamError as `freeze` does."""
    if params.kind is ModelKind.TRANSFORMERS:
        return freeze(model, spell_out_parts(model, params.freeze))
    return freeze(model, params.freeze)


def generated_folder(params: ModelParams) -> Path:
    """Return the folder of the backbones that are pretrained on generated pictures, one per configuration.

    It is one that the package ships, else it is under $MMFSDP_CACHE or the user's cache folder. It holds `vision/` in
    open_clip's layout and `language/` in transformers', or a whole model of transformers. Raises RuntimeError for a
    user without a home.
    """
    parts: list[Any] = [[str(part.source), part.name, part.config] for part in (params.vision, params.language)]
    if params.kind is ModelKind.TRANSFORMERS:
        parts = [params.config]
    text = json.dumps([RECIPE_VERSION, parts], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    if (SHIPPED / name).is_dir():
        return SHIPPED / name
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = os.environ.get("MMFSDP_CACHE") or os.path.join(cache, "mmfsdp")
    return Path(folder).expanduser() / name


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
        words = f"generated weights are not in {folder} yet; run `mmfsdp run`, which pretrains them first, or call "
        raise ParamError(f"{part}.weights", words + "mmfsdp.train.pretrain.ensure_backbones(params)")
    return backbone.change(weights=str(folder) if folder.is_dir() else None)
