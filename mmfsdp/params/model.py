"""ModelParams: which backbones, what is added to them, and what is frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .check import ParamError, at_least, coerce, need
from .enums import BackboneSource

GENERATED = "generated"
"""`weights` value: pretrained here, once, on the generated pictures, and kept in the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class BackboneParams:
    """A pretrained model that a multimodal model is built from."""

    source: BackboneSource = BackboneSource.TRANSFORMERS
    """The library that builds it: open_clip or transformers. Default transformers."""

    name: str = ""
    """A model name of that library (ViT-L-14), or a folder it can load. Default none: `config` says all."""

    weights: str | None = None
    """Where the weights come from: a tag (openai), a folder, a hub name, `generated` (pretrained here on the
    generated pictures and cached), or unset for random ones. Default unset."""

    config: dict[str, Any] = field(default_factory=dict)
    """The architecture, in the library's own configuration keys, where `name` is not enough. Needs no download."""

    def __post_init__(self) -> None:
        coerce(self)
        need(
            bool(self.name or self.config),
            "name",
            "is empty and config is empty too; give a model name, a folder or a configuration",
        )


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    """A Flamingo: a frozen vision encoder and language model, and the trainable parts between them."""

    vision: BackboneParams = BackboneParams(source=BackboneSource.OPEN_CLIP, name="ViT-B-32")
    """The vision encoder. Default open_clip ViT-B-32, random weights."""

    language: BackboneParams = BackboneParams(name="gpt2")
    """The causal language model. Default gpt2, random weights."""

    freeze: tuple[str, ...] = (
        "vision_encoder.*",
        "language_model.*",
        "!language_model.*.cross_attention.*",
        "!language_model.*.new_tokens.*",
    )
    """Name patterns of the parameters to freeze, in order; one that begins with ! makes trainable again. A pattern
    that matches nothing is an error. Default: all but the perceiver, the cross-attention and the new tokens."""

    cross_attention_every: int = 1
    """One gated cross-attention before every n-th decoder layer; a count of layers. Default 1."""

    cross_attend_all: bool = False
    """Text attends to all preceding pictures rather than to the latest one only. Default false."""

    num_latents: int = 64
    """Vectors that the perceiver resampler makes of each picture; a count. Default 64."""

    perceiver_depth: int = 6
    """Layers of the perceiver resampler; a count. Default 6."""

    attention_heads: int = 8
    """Attention heads of the perceiver and of the cross-attention; a count. Default 8."""

    attention_head_dim: int = 64
    """Width of one such head; a number of features. Default 64."""

    max_images: int | None = None
    """Pictures per sample that get a learned time embedding in the perceiver; a count. Default unset: none."""

    max_frames: int | None = None
    """Frames per picture (video) that get a learned embedding in the perceiver; a count. Default unset: none."""

    decoder_layers: str | None = None
    """Dotted name of the language model's list of decoder layers, where it cannot be found by structure. Default
    unset: found."""

    def __post_init__(self) -> None:
        coerce(self)
        at_least(self, 1, "cross_attention_every", "num_latents", "perceiver_depth", "attention_heads")
        at_least(self, 1, "attention_head_dim", "max_images", "max_frames")
        for pattern in self.freeze:
            if not pattern.lstrip("!"):
                raise ParamError("freeze", f"{pattern!r} is an empty pattern; remove it")
