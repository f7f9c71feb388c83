"""ModelParams: which backbones, what is added to them, and what is frozen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from .base import ParamError, Params
from .enums import BackboneSource, ProjectorKind
from .model_kinds import RECIPES, ModelKind, kinds_that_read
from .own import EXAMPLE, OwnCode, path_of

if TYPE_CHECKING:
    JsonValue = Any  # readers know what a config holds; pydantic checks that JSON can hold it
else:
    from pydantic import JsonValue

GENERATED = "generated"
"""`weights` value: pretrained here, once, on the generated pictures, and kept in the user's cache folder."""

PARTS = ("vision", "projector", "language", "lora")
"""Parts of a model of transformers, which may stand for the patterns of their parameters, whatever these are called."""


def freeze_patterns(patterns: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Return the patterns with the recipes among them spelled out."""
    spelled_out: list[str] = []
    for pattern in patterns:
        spelled_out += RECIPES.get(pattern, (pattern,))
    return tuple(spelled_out)


class BackboneParams(Params):
    """A pretrained model that a multimodal model is built from."""

    source: BackboneSource = BackboneSource.TRANSFORMERS
    """The library that builds it: open_clip or transformers. Default transformers."""

    name: str = ""
    """A model name of that library (ViT-L-14), or a folder it can load. Default none: `config` says all."""

    weights: str | None = None
    """Source of the weights: a tag (openai), a folder, a hub name, `generated` (pretrained here on the
    generated pictures and cached), or unset for random ones. Default unset."""

    config: dict[str, JsonValue] = {}
    """The architecture, in the library's own configuration keys, where `name` is not enough. Needs no download."""

    feature_layer: int | None = None
    """Hidden state of a transformers vision encoder that is used: -2 is LLaVA's. Default unset: its last output."""

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if not self.name and not self.config:
            raise ParamError("name", "is empty, and so is config; give a model name, a folder or a configuration")
        return self


class ModelParams(Params):
    """A vision encoder and a language model, mostly frozen, and the trainable parts between them."""

    kind: ModelKind = ModelKind.FLAMINGO
    """Architecture: flamingo (cross-attention to pictures), multimodal (pictures as tokens), transformers (a whole
    vision-language model, by `name`), own (your own, by `build`). Default flamingo."""

    build: OwnCode | None = None
    """Your own model: the import path of a function that returns (model, processor), my_model:build, or, with
    arguments, {call: my_model:build, width: 256}; or of a class of mmfsdp.kit.models.kinds.Kind, for a kind of your
    own. Setting it makes kind own. Default unset."""

    name: str = ""
    """Hub name (Qwen/Qwen2.5-VL-7B-Instruct) or folder of a vision-language model of transformers, with its processor.
    Default none: `config` or `weights` says all."""

    weights: str | None = None
    """Source of the weights of a model of transformers: a folder, a hub name, or `generated` (pretrained here and
    cached). Default unset: the weights of `name`; random without one."""

    config: dict[str, JsonValue] = {}
    """The architecture of a model of transformers, in the keys of its config.json. With it, planning needs no
    download. Default none: the architecture of `name`."""

    picture: dict[str, JsonValue] = {}
    """Result of the processor of a model of transformers for a picture, for a peak where there is only `config`: its
    `tokens`, the shapes of its float tensors and the values of the others. {tokens: 64, pixel_values: [256, 1176],
    image_grid_thw: [[1, 16, 16]]}. Default none."""

    vision: BackboneParams = BackboneParams(source=BackboneSource.OPEN_CLIP, name="ViT-B-32")
    """The vision encoder. Default open_clip ViT-B-32, random weights."""

    language: BackboneParams = BackboneParams(name="gpt2")
    """The causal language model. Default gpt2, random weights."""

    freeze: tuple[str, ...] | None = None
    """Name patterns of the parameters to freeze, in order; one that begins with ! makes trainable again. A pattern
    that matches nothing is an error. Names of recipes stand for their patterns: flamingo, llava_stage1 (trains the
    projectors), llava_stage2 (the language model, too), llava_lora. Default unset, which depends on the kind
    (`frozen_patterns`): all but the perceiver, the cross-attention and the new tokens; of a multimodal model,
    llava_stage1 (llava_lora with `lora_rank`). In a model of transformers vision, projector, language and lora stand
    for its parts: [vision, language] trains the rest, ['*', '!lora'] the adapters alone. Unset there: all but projector
    and lora. An own model is frozen as `build` returned it, with lora_rank all of it but the adapters; patterns freeze
    more, or train. Unset there: none."""

    projector: ProjectorKind = ProjectorKind.MLP
    """Module that carries the pictures' tokens into the language model of a multimodal model: linear, mlp. Default
    mlp."""

    lora_rank: int | None = Field(None, ge=1)
    """Rank of LoRA adapters on the matrices of the language model; not for a flamingo (needs peft: pip install
    peft). Default unset: none."""

    lora_targets: tuple[str, ...] = ()
    """Names of the matrices that get an adapter: [q_proj, v_proj]. Default none: all of the language model but the
    output's; an own model needs them."""

    loss_in_head: bool = True
    """Compute the loss inside the output head, a piece of the positions at a time, so that the logits of all positions,
    often the largest tensors of a step, are never in memory at once. A model that changes its logits before the loss
    keeps them whole, and the plan says so. An own model calls `mmfsdp.loss_in_head`. Default true."""

    fused_norms: bool = False
    """Compute the RMS norms by torch's fused kernel, in place of a dozen operators in fp32 each. In 16 bits results
    differ from transformers' in the last digits, and are nearer to those of fp64. What it saves was counted, and has
    not been timed on a GPU yet. Default false."""

    fused_swiglu: bool = False
    """Compute the activation of gated MLPs, silu(gate) * up, at once, and keep a third less of it for backward. A GPU's
    results in 16 bits, by one kernel, differ from transformers' in the last digits, and are nearer to those of fp64.
    It has not been timed on one yet. Default false."""

    cross_attention_every: int = Field(1, ge=1)
    """One gated cross-attention before every n-th decoder layer; a count of layers. Default 1."""

    cross_attend_all: bool = False
    """Text attends to all preceding pictures rather than to the latest one only. Default false."""

    num_latents: int = Field(64, ge=1)
    """Vectors that the perceiver resampler makes of each picture; a count. Default 64."""

    perceiver_depth: int = Field(6, ge=1)
    """Layers of the perceiver resampler; a count. Default 6."""

    attention_heads: int = Field(8, ge=1)
    """Attention heads of the perceiver and of the cross-attention; a count. Default 8."""

    attention_head_dim: int = Field(64, ge=1)
    """Width of one such head; a number of features. Default 64."""

    decoder_layers: str | None = None
    """Dotted name of the language model's list of decoder layers, where it cannot be found by structure. Default
    unset: found."""

    NEEDS: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        name: ("kind", kinds) for name, kinds in kinds_that_read().items()
    }
    SETS_BACK: ClassVar[dict[str, tuple[str, ...]]] = {
        kind.takes.chosen_by: ("kind", *(name for name, kinds in kinds_that_read().items() if kind not in kinds))
        for kind in ModelKind
        if kind.takes.chosen_by
    }

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        """Return the patterns of `freeze`; where it is unset, those of this kind of model."""
        if self.freeze is not None:
            return self.freeze
        return self.kind.takes.frozen_with_lora if self.lora_rank else self.kind.takes.frozen

    @model_validator(mode="before")
    @classmethod
    def _become_own(cls, values: Any) -> Any:
        """With `build` and no kind, take kind own."""
        if not isinstance(values, dict):  # a ModelParams
            return values
        for kind in ModelKind:
            field = kind.takes.chosen_by
            if field and values.get("kind") == kind and not values.get(field):
                raise ParamError(field, f"is unset, and kind {kind} needs it; write {EXAMPLE}")
            if field and values.get(field):
                values = {"kind": kind} | values
        return values

    @field_validator("freeze")
    @classmethod
    def _spell_out_recipes(cls, patterns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if patterns is None:
            return None
        for pattern in patterns:
            if not pattern.lstrip("!"):
                raise ValueError(f"{pattern!r} is an empty pattern; remove it")
        return freeze_patterns(patterns)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.kind.takes.check(self)
        for kind in ModelKind:
            if kind is not self.kind:
                self._check_not_of(kind)
        layer = self.language.feature_layer
        if layer is not None:
            raise ParamError("language.feature_layer", f"{layer} is for vision encoders only; remove it")
        for pattern in self.freeze or ():
            if "lora" in pattern and not self.lora_rank:
                kinds = [kind for kind in kinds_that_read()["lora_rank"] if not kind.takes.chosen_by]
                words = f"{pattern!r} needs LoRA; set lora_rank, and kind to {' or '.join(kinds)}"
                raise ParamError("freeze", words)
        if self.lora_targets and not self.lora_rank:
            raise ParamError("lora_targets", f"{list(self.lora_targets)} has no effect without lora_rank; set it")
        return self

    def _check_not_of(self, kind: ModelKind) -> None:
        """Raise ParamError for what only a model of another kind has."""
        value = getattr(self, kind.takes.chosen_by) if kind.takes.chosen_by else None
        if value is not None:
            words = f"{path_of(value)!r} is the kind {kind}, but kind is {self.kind}; unset one of the two"
            raise ParamError(kind.takes.chosen_by, words)
        for pattern, recipes in kind.takes.only_patterns.items():
            if pattern in (self.freeze or ()):
                raise ParamError("freeze", f"{pattern!r} ({recipes}) needs kind {kind}; set it")
