"""ModelParams: which backbones, what is added to them, and what is frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .check import ParamError, at_least, coerce, need, need_plain
from .enums import BackboneSource, Modality, ModelKind, ProjectorKind

GENERATED = "generated"
"""`weights` value: pretrained here, once, on the generated pictures, and kept in the user's cache folder."""

RECIPES: dict[str, tuple[str, ...]] = {
    "flamingo": (
        "vision_encoder.*",
        "language_model.*",
        "!language_model.*.cross_attention.*",
        "!language_model.*.new_tokens.*",
    ),
    "llava_stage1": ("encoders.*", "language_model.*"),
    "llava_stage2": ("encoders.*",),
    "llava_lora": ("encoders.*", "language_model.*", "!language_model.*.lora_*"),
}
"""What known recipes freeze, by the name that may stand for it among the patterns."""


def freeze_patterns(patterns: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Patterns with the recipes among them spelled out."""
    return tuple(one for pattern in patterns for one in RECIPES.get(pattern, (pattern,)))


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

    image_size: int | None = None
    """Side of the pictures that a vision encoder is given, in pixels, where it takes other sizes than its own. Default
    unset: its own."""

    feature_layer: int | None = None
    """Hidden state of a transformers vision encoder that is used: -2 is LLaVA's. Default unset: its last output."""

    def __post_init__(self) -> None:
        coerce(self)
        need(
            bool(self.name or self.config),
            "name",
            "is empty and config is empty too; give a model name, a folder or a configuration",
        )
        need_plain("config", self.config)


@dataclass(frozen=True, kw_only=True)
class EncoderParams(BackboneParams):
    """A further encoder of a multimodal model."""

    modality: Modality = Modality.AUDIO
    """What it takes, and its key: audio (Whisper's encoder), or vision. Default audio."""

    projector: ProjectorKind = ProjectorKind.MLP
    """What carries its tokens into the language model: linear, mlp, resampler. Default mlp."""


@dataclass(frozen=True, kw_only=True)
class ModelParams:
    """Encoders and a language model, mostly frozen, and the trainable parts between them."""

    kind: ModelKind = ModelKind.FLAMINGO
    """How pictures reach the language model: flamingo (cross-attention), multimodal (tokens). Default flamingo."""

    vision: BackboneParams = BackboneParams(source=BackboneSource.OPEN_CLIP, name="ViT-B-32")
    """The vision encoder. Default open_clip ViT-B-32, random weights."""

    language: BackboneParams = BackboneParams(name="gpt2")
    """The causal language model. Default gpt2, random weights."""

    freeze: tuple[str, ...] = RECIPES["flamingo"]
    """Name patterns of the parameters to freeze, in order; one that begins with ! makes trainable again. A pattern
    that matches nothing is an error. Names of recipes stand for their patterns: flamingo, llava_stage1 (trains the
    projectors), llava_stage2 (the language model, too), llava_lora. Default: all but the perceiver, the cross-attention
    and the new tokens; of a multimodal model, llava_stage1 (llava_lora with `lora_rank`)."""

    projector: ProjectorKind = ProjectorKind.MLP
    """What carries the pictures' tokens into the language model of a multimodal model: linear, mlp, resampler. Default
    mlp."""

    encoders: tuple[EncoderParams, ...] = ()
    """Further encoders of a multimodal model, one per modality: [{modality: audio, config: {model_type: whisper}}].
    Default none."""

    lora_rank: int | None = None
    """Rank of LoRA adapters beside all matrices of a multimodal model's language model (needs peft: pip install
    'mmfsdp[lora]'). Default unset: none."""

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
        object.__setattr__(self, "freeze", freeze_patterns(self.freeze))
        self._check_kind()
        at_least(self, 1, "cross_attention_every", "num_latents", "perceiver_depth", "attention_heads")
        at_least(self, 1, "attention_head_dim", "max_images", "max_frames", "lora_rank")
        for pattern in self.freeze:
            if not pattern.lstrip("!"):
                raise ParamError("freeze", f"{pattern!r} is an empty pattern; remove it")

    def _check_kind(self) -> None:
        others = {"language": self.language} | {f"encoders.{i}": one for i, one in enumerate(self.encoders)}
        for place, one in others.items():
            for name in ("image_size", "feature_layer"):
                if getattr(one, name) is not None:
                    raise ParamError(f"{place}.{name}", f"{getattr(one, name)} is for vision encoders only; remove it")
        if self.kind is ModelKind.MULTIMODAL:
            if self.freeze == RECIPES["flamingo"]:
                object.__setattr__(self, "freeze", RECIPES["llava_lora" if self.lora_rank else "llava_stage1"])
            kinds = [one.modality for one in self.encoders]
            need(
                len({Modality.VISION, *kinds}) == len(kinds) + 1,
                "encoders",
                f"{', '.join(kinds)} beside vision: there can be one encoder per modality; remove one",
            )
            return
        for name, default in {"projector": ProjectorKind.MLP, "encoders": (), "lora_rank": None}.items():
            if getattr(self, name) != default:
                raise ParamError(
                    name, f"{getattr(self, name)} has no effect with kind flamingo; remove it or set kind to multimodal"
                )
