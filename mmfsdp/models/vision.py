"""VisionEncoder: patch tokens from open_clip's visual towers and transformers' vision models.

N pictures, C channels, H and W pixels, P patches, D width.
"""

from __future__ import annotations

import difflib
import json
import os
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn

from ..params import BackboneParams, BackboneSource, ParamError
from . import hub
from .shapes import output_shape

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_NORMALIZATION = {
    "siglip_vision_model": (HALF, HALF),
    "siglip2_vision_model": (HALF, HALF),
    "vit": (HALF, HALF),
    "dinov2": (IMAGENET_MEAN, IMAGENET_STD),
    "dinov2_with_registers": (IMAGENET_MEAN, IMAGENET_STD),
}
NO_TEXT = {"context_length": 1, "vocab_size": 1, "width": 8, "heads": 1, "layers": 1}


class VisionEncoder(nn.Module):
    """A visual tower that gives patch tokens. Class and register tokens are left out, as in OpenFlamingo."""

    def __init__(
        self,
        visual: Any,
        *,
        image_size: int,
        mean: tuple[float, ...] = CLIP_MEAN,
        std: tuple[float, ...] = CLIP_STD,
        feature_layer: int | None = None,
    ):
        """feature_layer: of a transformers model, the hidden state to give (-2 is LLaVA's); default its last output."""
        super().__init__()
        self.visual, self.feature_layer = visual, feature_layer
        self.image_size, self.mean, self.std = image_size, tuple(mean), tuple(std)
        if hasattr(visual, "output_tokens"):  # open_clip's ViT: its forward then gives (pooled, tokens)
            visual.output_tokens = True
        elif hasattr(visual, "forward_intermediates"):
            _give_feature_maps(visual)
        self.item_shape: tuple[int, ...] = (3, image_size, image_size)
        _, self.num_tokens, self.dim = output_shape(self, torch.empty(2, *self.item_shape, device="meta"))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W), normalized -> (N, P, D)."""
        weight = next(self.visual.parameters(), None)  # none to see within a unit of FSDP1, which casts by itself
        tokens = self._tokens(pixels if weight is None else pixels.to(weight.dtype))
        return tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens  # convolutions give (N, D, h, w)

    def _tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        if hasattr(self.visual, "output_tokens"):
            pooled, tokens = self.visual(pixels)
            return _with_pooled(tokens, pooled)
        if hasattr(self.visual, "forward_intermediates"):
            maps = self.visual(pixels)
            return (maps["image_intermediates"] if isinstance(maps, dict) else maps)[-1]
        config = self.visual.config
        asked: dict[str, bool] = {}
        if config.image_size not in (pixels.shape[-1], [*pixels.shape[-2:]]) and config.model_type != "dinov2":
            asked["interpolate_pos_encoding"] = True  # DINOv2 does so unasked
        if self.feature_layer is not None:
            asked["output_hidden_states"] = True
        out = self.visual(pixel_values=pixels, **asked)
        tokens = out.last_hidden_state if self.feature_layer is None else out.hidden_states[self.feature_layer]
        tokens = _with_pooled(tokens, getattr(out, "pooler_output", None))
        patch = getattr(config, "patch_size", None)
        if tokens.ndim == 3 and isinstance(patch, int):
            tokens = tokens[:, -((pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)) :]
        return tokens


def _give_feature_maps(visual: Any) -> None:
    """Have the forward of open_clip's timm and ResNet towers give their last feature maps, in place. They have a method
    of another name for it, but a sharded module's weights are there only while its own forward runs. What would pool
    the maps goes.
    """
    wanted: dict[str, Any] = {"indices": 1, "intermediates_only": True}
    if hasattr(visual, "trunk"):
        visual.trunk.forward = partial(visual.trunk.forward_intermediates, norm=True, **wanted)
        visual.forward = MethodType(lambda self, pixels: self.trunk(pixels), visual)
        visual.head = nn.Identity()
    else:
        visual.attnpool = nn.Identity()
        visual.forward = partial(visual.forward_intermediates, normalize_intermediates=True, **wanted)


def _with_pooled(tokens: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
    """The tokens. Where the pooled output trains, it takes part with a gradient of 0: DDP waits for every parameter."""
    return tokens if pooled is None or not pooled.requires_grad else tokens + 0 * pooled.sum()


def build_vision(params: BackboneParams, *, meta: bool = False) -> VisionEncoder:
    """The vision encoder of `params`; on the meta device, without weights or download, with `meta`.

    Raises ParamError for a name or configuration that the library does not know, or a size or layer that the encoder
    does not have.
    """
    build = _open_clip if params.source is BackboneSource.OPEN_CLIP else _transformers
    visual, looks = build(params, meta)
    size = params.image_size or looks.pop("image_size")
    try:
        return VisionEncoder(visual, **{**looks, "image_size": size}, feature_layer=params.feature_layer)
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError) as error:
        field = "image_size" if params.image_size else "feature_layer"
        raise ParamError(
            f"vision.{field}", f"{getattr(params, field)} does not suit {type(visual).__name__}: {error}"
        ) from None


def normalization(model_type: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that transformers' vision models of a type were trained with; CLIP's if unknown."""
    return _NORMALIZATION.get(model_type, (CLIP_MEAN, CLIP_STD))


def _open_clip(params: BackboneParams, meta: bool) -> tuple[nn.Module, dict[str, Any]]:
    import open_clip

    if params.feature_layer is not None:
        raise ParamError("vision.feature_layer", f"{params.feature_layer} needs source transformers; remove it")
    visual: Any
    if not params.weights or meta:
        visual = _untrained(params, meta)
    elif Path(params.weights).is_dir():
        visual = open_clip.create_model(f"local-dir:{params.weights}").visual
    else:
        _builtin(params.name)
        if params.config:
            raise ParamError("vision.config", f"has no effect with weights {params.weights!r}; remove one of the two")
        visual = _of_tag(params.name, params.weights).visual
    _lead_with_tokens(visual)
    size = visual.image_size
    looks = getattr(visual, "preprocess_cfg", None) or params.config.get("preprocess_cfg", {})
    return visual, {
        "image_size": size if isinstance(size, int) else size[0],
        "mean": looks.get("mean", CLIP_MEAN),
        "std": looks.get("std", CLIP_STD),
    }


def _lead_with_tokens(visual: nn.Module) -> None:
    """Have a ViT's blocks compute on [tokens, batch, width], as open_clip can: torch's attention turns [batch, tokens,
    width] so that frozen layers copy their weights for each token in 16 bits on CPUs, 15 times the work of a ViT-B."""
    from open_clip.transformer import ResidualAttentionBlock, Transformer

    modules: Any = visual.modules()
    for module in modules:
        blocks = module.resblocks if type(module) is Transformer else ()
        if blocks and all(type(b) is ResidualAttentionBlock and type(b.attn) is nn.MultiheadAttention for b in blocks):
            module.batch_first = False
            for block in blocks:
                block.attn.batch_first = False


def _of_tag(name: str, weights: str) -> Any:
    """open_clip's model with the weights of a tag or file; without network, with what was downloaded before."""
    import open_clip

    tag = open_clip.get_pretrained_cfg(name, weights)
    if not tag and not Path(weights).is_file():
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "a file of weights"
        raise ParamError("vision.weights", f"{weights!r} is no tag of open_clip's {name}, nor a file; choose {tags}")
    try:
        if not tag or hub.answers():
            return open_clip.create_model(name, pretrained=weights)
        repository, file = os.path.split(tag["hf_hub"])
        pattern = f"{Path(file).stem or 'open_clip*model'}.*"  # open_clip, too, prefers .safetensors to .bin
        kept = Path(snapshot_download(repository, local_files_only=True)).glob(pattern)
        path = max(kept, key=lambda path: path.suffix)
    except (OSError, RuntimeError, ValueError) as error:
        reason = hub.SILENT if tag and not hub.answers() else str(error).splitlines()[0]
        raise ParamError("vision.weights", f"{weights!r} gives no {name} ({reason}); give a folder or a tag") from None
    return open_clip.create_model(name, pretrained=str(path), force_preprocess_cfg=tag)


def _untrained(params: BackboneParams, meta: bool) -> nn.Module:
    """The visual tower of open_clip's CLIP for a configuration, without the text tower's size or weights."""
    import open_clip

    config = open_clip_config(params)
    try:
        with torch.device("meta" if meta else "cpu"):
            return open_clip.CLIP(
                config["embed_dim"], config["vision_cfg"], NO_TEXT, quick_gelu=config.get("quick_gelu", False)
            ).visual
    except (TypeError, RuntimeError) as error:
        raise ParamError("vision.config", f"{config['vision_cfg']!r} is not open_clip's vision_cfg: {error}") from None


def open_clip_config(params: BackboneParams) -> dict[str, Any]:
    """open_clip's configuration of a model: a folder's, or that of a name with `config` on top. Raises ParamError."""
    folder = next((place for place in (params.weights, params.name) if place and Path(place).is_dir()), None)
    if folder:
        config = json.loads((Path(folder) / "open_clip_config.json").read_text(encoding="utf-8"))["model_cfg"]
    else:
        config = {**_builtin(params.name), **params.config}
    unknown = config.keys() - {"embed_dim", "vision_cfg", "quick_gelu", "text_cfg", "custom_text", "preprocess_cfg"}
    if unknown or not config.keys() >= {"embed_dim", "vision_cfg"}:
        raise ParamError(
            "vision.config",
            f"{config!r} needs embed_dim and vision_cfg, and may hold text_cfg, quick_gelu "
            "and preprocess_cfg, as in open_clip's own configurations",
        )
    return config


def _builtin(name: str) -> dict[str, Any]:
    """open_clip's own configuration of a name; empty for none. Raises ParamError for an unknown name."""
    import open_clip

    config = open_clip.get_model_config(name) if name else {}
    if config is None:
        near = ", ".join(difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.3))
        raise ParamError("vision.name", f"open_clip has no model {name!r}; near names are {near}; or set vision.config")
    return config


def _transformers(params: BackboneParams, meta: bool) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import AutoModel

    from .language import load_config, pretrained

    config = load_config(params, "vision")
    config = getattr(config, "vision_config", config)
    if params.weights and not meta:
        visual = pretrained(AutoModel, params.weights, "vision.weights", config=config, dtype=torch.float32)
    else:
        with torch.device("meta" if meta else "cpu"):
            visual = AutoModel.from_config(config, dtype=torch.float32)
    mean, std = normalization(config.model_type)
    return visual, {"image_size": config.image_size, "mean": mean, "std": std}
