"""VisionEncoder: pictures to tokens, by open_clip's visual towers and transformers' vision models.

N pictures, C channels, H and W pixels, P tokens of a picture, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from ...core.guards import WRAPPERS
from ...params import BackboneParams, BackboneSource, ParamError
from .backbones import load_config, load_from_transformers, output_shape

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMALIZATION = {
    "siglip_vision_model": (HALF, HALF),
    "vit": (HALF, HALF),
    "dinov2": IMAGENET,
    "dinov2_with_registers": IMAGENET,
}
"""Mean and standard deviation of pixels by transformers' model_type; others are CLIP's."""


class VisionEncoder(nn.Module):
    """A visual tower that returns patch tokens. Class and register tokens are left out, as in OpenFlamingo."""

    def __init__(
        self,
        visual: Any,
        *,
        image_size: int,
        mean: tuple[float, ...] = CLIP_MEAN,
        std: tuple[float, ...] = CLIP_STD,
        feature_layer: int | None = None,
    ):
        """feature_layer: of a transformers model, the hidden state to return (-2 is LLaVA's); default its output."""
        super().__init__()
        self.feature_layer = feature_layer
        self.image_size, self.mean, self.std = image_size, tuple(mean), tuple(std)
        if hasattr(visual, "output_tokens"):  # open_clip's ViT: its forward then returns (pooled, tokens)
            visual.output_tokens = True
        self.item_shape: tuple[int, ...] = (3, image_size, image_size)
        self.visual = runs_without_ranks(visual)
        _, self.num_tokens, self.dim = output_shape(self, torch.empty(2, *self.item_shape, device="meta"))
        self.visual = visual

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W), normalized -> (N, P, D)."""
        pixels = as_weights(pixels, self.visual)
        if hasattr(self.visual, "output_tokens"):  # open_clip's ViT
            pooled, tokens = self.visual(pixels)  # (N, D), (N, P, D)
            return with_pooled(tokens, pooled)
        out = self.visual(pixel_values=pixels, output_hidden_states=self.feature_layer is not None)
        tokens = out.last_hidden_state if self.feature_layer is None else out.hidden_states[self.feature_layer]
        tokens = with_pooled(tokens, getattr(out, "pooler_output", None))
        if tokens.ndim == 4:  # convolutions give (N, D, h, w)
            return tokens.flatten(2).transpose(1, 2)
        patch = getattr(self.visual.config, "patch_size", None)
        if isinstance(patch, int):  # patches come last, after class and register tokens
            patches = (pixels.shape[-2] // patch) * (pixels.shape[-1] // patch)
            tokens = tokens[:, -patches:]
        return tokens


def runs_without_ranks(visual: Any) -> Any:
    """Return a model whose output has the same shape and that runs without ranks: the model itself, or a copy of it.

    A sharded model cannot run before all of it is wrapped. The configuration of transformers is enough for a copy
    without weights.
    """
    is_sharded = any(isinstance(module, WRAPPERS) for module in visual.modules())
    if not is_sharded or not isinstance(visual, PreTrainedModel):
        return visual
    with torch.device("meta"):
        return type(visual)(visual.config)  # torch makes the plain class of one that fully_shard has changed


def encoder_of(model: PreTrainedModel) -> VisionEncoder:
    """Return the encoder of a vision model of transformers: its configuration says which pictures it takes.

    Raises ParamError for a model that takes no pictures of one size.
    """
    config: Any = model.config
    size = getattr(config, "image_size", None)
    if not isinstance(size, int):
        raise ParamError(
            "image_size",
            f"the configuration of {type(model).__name__} has image_size {size!r}; for a model of square pictures of "
            "one size give ModalEncoder(VisionEncoder(model, image_size=...))",
        )
    mean, std = normalization(config.model_type)
    return VisionEncoder(model, image_size=size, mean=mean, std=std)


def as_weights(items: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Cast to the dtype of a module's weights. Inside a unit of FSDP1, which casts by itself, none are visible."""
    weight = next(module.parameters(), None)
    return items if weight is None else items.to(weight.dtype)


def with_pooled(tokens: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens. A pooled output that trains is added with factor 0: DDP waits for every gradient."""
    if pooled is None or not pooled.requires_grad:
        return tokens
    return tokens + 0 * pooled.sum()


def build_vision(params: BackboneParams, *, meta: bool = False) -> VisionEncoder:
    """Return the vision encoder of `params`; with `meta` on the meta device, without weights or download.

    Raises ParamError for a name or configuration that the library does not know, and for a layer that the encoder does
    not have.
    """
    if params.source is BackboneSource.OPEN_CLIP:
        from .open_clip_towers import load_tower  # open_clip takes a second to import, and other models need none of it

        visual, preprocessing = load_tower(params, meta=meta)
    else:
        visual, preprocessing = _transformers_tower(params, meta)
    try:
        return VisionEncoder(visual, **preprocessing, feature_layer=params.feature_layer)
    except IndexError:  # of the hidden states of a transformers model
        layers: Any = visual.config.num_hidden_layers  # type: ignore[union-attr]
        words = f"{params.feature_layer} is no layer of {type(visual).__name__}, which has {layers}; "
        raise ParamError("vision.feature_layer", words + f"choose {-layers - 1} to {layers}") from None


def _transformers_tower(params: BackboneParams, meta: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return a vision model of transformers, and the size, mean and std of its pictures."""
    config = load_config(params, "vision")
    config = getattr(config, "vision_config", config)
    if not hasattr(config, "image_size"):
        name = f"{config.model_type} ({type(config).__name__})"
        raise ParamError("vision", f"{name} has no image_size; choose one that has, such as siglip_vision_model")
    if params.weights and not meta:
        visual = load_from_transformers(AutoModel, params.weights, "vision.weights", config=config, dtype=torch.float32)
    else:
        with torch.device("meta" if meta else "cpu"):
            visual = AutoModel.from_config(config, dtype=torch.float32)
    mean, std = normalization(config.model_type)
    return visual, {"image_size": config.image_size, "mean": mean, "std": std}


def normalization(model_type: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation that transformers' vision models of a type were trained with."""
    return NORMALIZATION.get(model_type, (CLIP_MEAN, CLIP_STD))
