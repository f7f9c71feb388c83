"""ModelKind: the kinds of model, and what each takes from the parameters. Its class is in mmfsdp.kit.models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import ParamError
from .enums import Choice

Params = Any
"""A ModelParams, whose module imports this one."""

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
"""Patterns of known recipes, by the name that may stand for them among the patterns."""


def _any(params: Params) -> None:
    """Take all parameters."""


@dataclass(frozen=True)
class KindParams:
    """Say what a kind of model takes from ModelParams, and what it asks of them."""

    fields: tuple[str, ...] = ()
    """Fields that it reads, of those that not every kind reads: with it they have an effect."""
    frozen: tuple[str, ...] = ()
    """Patterns that are frozen unless `freeze` says otherwise."""
    frozen_with_lora: tuple[str, ...] = ()
    """Patterns of what is frozen by default with LoRA adapters."""
    only_patterns: Mapping[str, str] = field(default_factory=dict)
    """Patterns that only models of this kind have parameters for, and the recipes that they come from."""
    chosen_by: str = ""
    """A field that chooses this kind by being set, and that no other kind has."""
    own_processor: bool = False
    """Its own processor reads the pictures: data.augment and data.feature_cache have no effect."""
    check: Callable[[Params], None] = _any
    """Raise ParamError for parameters that lack something, or that do not go together."""


BACKBONES = (
    "vision",
    "language",
    "cross_attention_every",
    "cross_attend_all",
    "num_latents",
    "perceiver_depth",
    "attention_heads",
    "attention_head_dim",
    "decoder_layers",
    "loss_in_head",
    "fused_norms",
    "fused_swiglu",
)
"""Fields of a kind that is put together from a vision encoder and a language model."""
LORA = ("lora_rank", "lora_targets")


def _check_named(params: Params) -> None:
    if not (params.name or params.weights or params.config):
        raise ParamError("name", "is empty; give a model such as Qwen/Qwen2.5-VL-7B-Instruct, or a folder")


def _check_targets(params: Params) -> None:
    if params.lora_rank and not params.lora_targets:
        raise ParamError("lora_targets", "is empty, and an own model needs it; name matrices, such as [q_proj]")


class ModelKind(Choice):
    """The way of media into the language model. A new one is an entry here and a class; see kit/models/kinds.py."""

    takes: KindParams
    """The parameters that it reads."""

    FLAMINGO = (
        "flamingo",
        "By gated cross-attention between its layers.",
        "mmfsdp.kit.models.flamingo_kind:FlamingoKind",
        KindParams(BACKBONES, frozen=RECIPES["flamingo"], frozen_with_lora=RECIPES["flamingo"]),
    )
    MULTIMODAL = (
        "multimodal",
        "As tokens among the text's, through a projector (LLaVA).",
        "mmfsdp.kit.models.multimodal_kind:MultimodalKind",
        KindParams(
            ("projector", *BACKBONES, *LORA),
            frozen=RECIPES["llava_stage1"],
            frozen_with_lora=RECIPES["llava_lora"],
            only_patterns={"encoders.*": "llava_stage1, 2, llava_lora"},
        ),
    )
    TRANSFORMERS = (
        "transformers",
        "As a vision-language model of transformers does it; `name` says which.",
        "mmfsdp.kit.models.transformers_kind:TransformersKind",
        KindParams(
            ("name", "weights", "config", "picture", "loss_in_head", "fused_norms", "fused_swiglu", *LORA),
            frozen=("*", "!projector"),
            frozen_with_lora=("*", "!projector", "!lora"),
            own_processor=True,
            check=_check_named,
        ),
    )
    OWN = (
        "own",
        "As your own model does it; `build` says which.",
        "mmfsdp.kit.models.own_kind:OwnKind",
        KindParams(LORA, chosen_by="build", own_processor=True, check=_check_targets),
    )


def kinds_that_read() -> dict[str, tuple[ModelKind, ...]]:
    """Return the kinds that read each field of ModelParams, of those that not every kind reads."""
    kinds: dict[str, tuple[ModelKind, ...]] = {}
    for kind in ModelKind:
        for name in kind.takes.fields:
            kinds[name] = (*kinds.get(name, ()), kind)
    return kinds
