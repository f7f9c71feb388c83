"""ViTs of open_clip: with released weights, from a folder, or untrained from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.transformer import ResidualAttentionBlock, Transformer
from torch import nn

from ...params import BackboneParams, ParamError
from ...params.base import did_you_mean

NO_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}
"""open_clip's text_cfg of the smallest text tower: a CLIP cannot be built without one."""
CONFIG_KEYS = {"embed_dim", "vision_cfg", "quick_gelu", "text_cfg", "custom_text", "preprocess_cfg"}


def load_tower(params: BackboneParams, *, meta: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return a visual tower and its pictures' size, with their mean and std where named. Raises ParamError."""
    if params.feature_layer is not None:
        raise ParamError("vision.feature_layer", f"{params.feature_layer} needs source transformers; remove it")
    visual: Any
    if not params.weights or meta:
        visual = _untrained(params, meta)
    elif Path(params.weights).is_dir():
        visual = open_clip.create_model(f"local-dir:{params.weights}").visual
    elif params.config:
        raise ParamError("vision.config", f"has no effect with weights {params.weights!r}; remove one of the two")
    else:
        visual = _released(params.name, params.weights).visual
    if not hasattr(visual, "output_tokens"):
        words = (
            f"{type(visual).__name__} of open_clip returns no patch tokens; choose a ViT of it, or source transformers"
        )
        raise ParamError("vision.name", words)
    _put_tokens_first(visual)
    size = visual.image_size
    config = getattr(visual, "preprocess_cfg", None) or params.config.get("preprocess_cfg", {})
    named = {key: config[key] for key in ("mean", "std") if key in config}
    return visual, {"image_size": size if isinstance(size, int) else size[0], **named}


def _untrained(params: BackboneParams, meta: bool) -> nn.Module:
    """Return the visual tower of a CLIP of random weights, whose text tower is as small as can be."""
    config = open_clip_config(params)
    try:
        with torch.device("meta" if meta else "cpu"):
            return open_clip.CLIP(
                config["embed_dim"], config["vision_cfg"], NO_TEXT, quick_gelu=config.get("quick_gelu", False)
            ).visual
    except (TypeError, RuntimeError) as error:
        raise ParamError("vision.config", f"{config['vision_cfg']!r} is not open_clip's vision_cfg: {error}") from None


def open_clip_config(params: BackboneParams) -> dict[str, Any]:
    """Return open_clip's configuration: from a folder, or from a name with `config` on top. Raises ParamError."""
    folders = [source for source in (params.weights, params.name) if source and Path(source).is_dir()]
    if folders:
        config = _known_config(f"local-dir:{folders[0]}")
    else:
        config = {**_known_config(params.name), **params.config}
    if config.keys() - CONFIG_KEYS or not config.keys() >= {"embed_dim", "vision_cfg"}:
        optional = "text_cfg, quick_gelu and preprocess_cfg, as in open_clip's own configurations"
        raise ParamError("vision.config", f"{config!r} needs embed_dim and vision_cfg, and may hold {optional}")
    return config


def _known_config(name: str) -> dict[str, Any]:
    """Return open_clip's configuration of a name or a folder; empty for no name. Raises ParamError for another name."""
    config = open_clip.get_model_config(name) if name else {}
    if config is None:
        raise ParamError("vision.name", f"open_clip has no {name!r}{did_you_mean(name, open_clip.list_models())}")
    return config


def _released(name: str, weights: str) -> Any:
    """Return open_clip's model with the weights of a tag or file. Raises ParamError."""
    try:
        return open_clip.create_model(name, pretrained=weights)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ParamError("vision.weights", f"{weights!r} gives no {name} ({reason}); give a folder or a tag") from None


def _put_tokens_first(visual: nn.Module) -> None:
    """Let a ViT's blocks compute on (tokens, batch, width), which open_clip supports too.

    From (batch, tokens, width), torch 2.11's attention copies frozen weights for each token in 16 bits on CPUs: 15
    times the work of a ViT-B. In eval mode, where frozen encoders are, torch would take a fused attention, whose
    operations it does not count.
    """
    for module in visual.modules():
        if type(module) is not Transformer:
            continue
        blocks: Any = module.resblocks
        if all(type(block) is ResidualAttentionBlock and type(block.attn) is nn.MultiheadAttention for block in blocks):
            module.batch_first = False  # type: ignore[assignment]
            for block in blocks:
                block.attn.batch_first = False
