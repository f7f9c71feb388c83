"""build_model: from ModelParams to a model and the processor that feeds it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from .data.processor import Processor
from .models import Flamingo, TokenIds, VisionEncoder, build_language, build_vision, load_tokenizer
from .params import GENERATED, BackboneParams, ModelParams, ParamError
from .params.run import plain

RECIPE = 1
"""Raise it when the generated pictures or their pretraining change: what older versions pretrained is then left."""


def build_model(params: ModelParams, *, meta: bool = False) -> tuple[Flamingo, Processor | None]:
    """The model of `params` and its processor. Everything is trainable: `freeze` comes after.

    With `meta` parameters have shapes only and nothing is downloaded. The processor is None where there is no
    tokenizer: for a language model without name and weights, or, with `meta`, one that is not in a folder. New parts
    start from torch's random state. Raises ParamError naming the field that is wrong.
    """
    vision_params, language_params = (_found(params, part, meta) for part in ("vision", "language"))
    vision = build_vision(vision_params, meta=meta)
    language = build_language(language_params, meta=meta)
    processor, tokens = _processor(language_params, language, vision, meta)
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
    cache = os.environ.get("MMFSDP_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mmfsdp"
    what = json.dumps([RECIPE, plain(asdict(params.vision)), plain(asdict(params.language))], sort_keys=True)
    return Path(cache).expanduser() / hashlib.sha256(what.encode()).hexdigest()[:16]


def needs_backbones(params: ModelParams) -> bool:
    """True if generated weights are wanted and not there yet."""
    parts = [part for part in ("vision", "language") if getattr(params, part).weights == GENERATED]
    return any(not (generated_folder(params) / part).is_dir() for part in parts)


def _found(params: ModelParams, part: str, meta: bool) -> BackboneParams:
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


def _processor(
    params: BackboneParams, language: PreTrainedModel, vision: VisionEncoder, meta: bool
) -> tuple[Processor | None, TokenIds]:
    """The processor, where there is a tokenizer, and the ids of the tokens that it has added."""
    places = [place for place in (params.weights, params.name) if place]
    if not places or (meta and not any(Path(place).is_dir() for place in places)):
        table = language.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return None, TokenIds.after(table.num_embeddings)
    tokenizer = load_tokenizer(params)
    known = len(tokenizer)
    processor = Processor(tokenizer, vision.image_size, vision.mean, vision.std)
    language.generation_config.eos_token_id = tokenizer.eos_token_id
    ids = {"image": processor.image_id, "end_of_chunk": processor.end_id, "pad": processor.pad_id}
    return processor, TokenIds(**ids, known=known, new=len(tokenizer) - known)
