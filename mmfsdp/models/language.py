"""Causal language models and tokenizers of transformers, from a name, a folder or a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..params import BackboneParams, ParamError
from ..params.check import unknown_key
from . import hub

_ALSO_READ = {"head_dim", "rope_theta", "rope_scaling", "rotary_pct", "partial_rotary_factor", "attn_implementation"}
"""Keys that transformers reads where they are set, although the default configuration lacks them."""


def build_language(params: BackboneParams, *, meta: bool = False) -> PreTrainedModel:
    """The causal LM of `params`, in fp32; on the meta device, without weights or download, with `meta`.

    Raises ParamError where the weights do not have the shapes that `params.config` promises.
    """
    if not params.weights or (meta and params.config):
        config = load_config(params, "language")
        with torch.device("meta" if meta else "cpu"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if meta:
        return build_language(replace(params, name=params.weights, weights=None), meta=True)
    model, info = pretrained(
        AutoModelForCausalLM, params.weights, "language.weights", dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ParamError("language.weights", f"{params.weights!r} lacks {len(missing)} weights, such as {missing[0]}")
    promised = build_language(params, meta=True) if params.config else model
    shapes = {name: tuple(p.shape) for name, p in promised.named_parameters()}
    wrong = [name for name, p in model.named_parameters() if shapes.pop(name, None) != p.shape] + list(shapes)
    if wrong:
        raise ParamError("language.config", f"{wrong[0]} is not as in {params.weights!r}; correct config or remove it")
    return model


def load_config(params: BackboneParams, field: str) -> Any:
    """The transformers configuration of `params`: its `config`, which must name a model_type, or that of its name."""
    values = dict(params.config)
    if not values:
        return pretrained(AutoConfig, params.name, f"{field}.name")
    if "model_type" not in values:
        raise ParamError(f"{field}.config", f"{params.config!r} names no model_type; add one, such as llama")
    kind = values.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
        unknown = [key for key in values if not hasattr(default, key) and key not in _ALSO_READ]
        if unknown:
            raise unknown_key(unknown[0], default.to_dict()).under(f"{field}.config")
        return AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        if isinstance(error, ParamError):
            raise
        raise ParamError(f"{field}.config", f"{params.config!r} is not a transformers configuration: {error}") from None


def load_tokenizer(params: BackboneParams) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the language model. Raises ParamError where there is none."""
    return pretrained(AutoTokenizer, params.weights or params.name, "language.name")


def pretrained(cls: Any, source: str, field: str, **kwargs: Any) -> Any:
    """What a class of transformers makes of a folder or a hub name; without network, of what was downloaded before.

    Raises ParamError naming the `field` that says `source`.
    """
    away = not Path(source).is_dir() and not hub.answers()
    try:
        return cls.from_pretrained(source, local_files_only=away, **kwargs)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = hub.SILENT if away else str(error).splitlines()[0]
        raise ParamError(
            field, f"{source!r} gives no {cls.__name__.removeprefix('Auto')} ({reason}); give a folder or a hub name"
        ) from None
