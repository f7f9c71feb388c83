"""MediaModel: the forward, generation, loss and train mode of all models that put media into a language model.

B batch, L tokens, T pictures or sounds of a sample, N tokens of each, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...core.token_loss import SWITCHED_OFF
from .backbones import CACHE, forward_arguments
from .head_targets import mean_of, next_tokens, targets_in_head
from .tokens import TokenIds


@dataclass
class MediaOutput(CausalLMOutputWithPast):
    """The output of `forward`: loss (a scalar, the mean over the labels that count), logits (B, L, V), the KV cache
    (`past_key_values`, with `use_cache`), and what follows."""

    media_tokens: Any = None
    """The encoded media, which a later call takes instead of `media`: Flamingo's is (B, T, N, D), MultimodalModel's
    (B, T*N, D) by key."""
    vision_features: torch.Tensor | None = None
    """(B, T, F, P, D): the vision encoder's output, F frames of P patches, with `features_only`."""


class MediaModel(GenerationMixin, nn.Module, ABC):
    """A language model that takes pictures or sounds as well as text."""

    main_input_name = "input_ids"
    _is_stateful = False
    language_model: Any
    tokens: TokenIds
    placeholder_ids: list[int]
    """Ids that generation must not produce."""
    whole_logits: str = SWITCHED_OFF
    """The reason why a forward with labels computes the logits of all positions at once, and returns them; "" after
    `loss_in_head`: the head then computes the loss piece by piece, and the output has no logits."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # transformers' generate reads much: device, dtype, config, generation_config, ...
            return getattr(super().__getattr__("language_model"), name)

    own_modules: ClassVar[frozenset[str]] = frozenset()
    """Names of the modules that belong to no backbone."""

    def is_of_no_backbone(self, name: str) -> bool:
        """Return True if a parameter or buffer of this dotted name belongs to no backbone."""
        return not self.own_modules.isdisjoint(name.split("."))

    def take_language_model(self) -> Any:
        """Return the language model as its library has it. The model is taken apart and cannot be used afterwards."""
        return self.language_model

    @property
    def picture_key(self) -> str:
        """Return the key of pictures in `media`."""
        return "vision"

    @abstractmethod
    def _pictures(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B,): the number of pictures that each sample announces."""

    @abstractmethod
    def _features(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the encoders' output by key: (B, T, F, P, D) of pictures. Raises ValueError."""

    @abstractmethod
    def _encode(self, features: dict[str, torch.Tensor]) -> Any:
        """Return media tokens."""

    @abstractmethod
    def _media_time(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B, L): the number of placeholders up to each token."""

    @abstractmethod
    def _check(self, input_ids: torch.Tensor, media_tokens: Any) -> None:
        """Raise ValueError if the placeholders in input_ids do not match the media."""

    @abstractmethod
    def _decode(self, input_ids: torch.Tensor, media_tokens: Any, media_time: torch.Tensor, **kwargs: Any) -> Any:
        """Return the language model's output."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_positions: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        media: Mapping[str, torch.Tensor] | None = None,
        media_tokens: Any = None,
        media_time: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        features_only: bool = False,
        return_dict: bool = True,
    ) -> MediaOutput:
        """Return logits or, if there are labels, the loss.

        input_ids (B, L), attention_mask (B, L or, with a cache, all tokens so far), labels (B, L), -100 for no loss,
        loss_positions (R,), those with a loss as `loss_positions` of core/step_batch.py gives them, by default all.
        Pictures come as `media["vision"]` (B, T, F, C, H, W), as `media["vision_features"]` (B, T, F, P, D), or as the
        `media_tokens` of an earlier output; without input_ids they are only encoded, with `features_only` only by the
        vision encoder. `pixel_values` (pictures, C, H, W), as processors of transformers give them, are all samples'
        pictures in order; the placeholders in input_ids say whose they are, and reading them waits for a GPU.
        `media_time` (B, L), placeholders up to each token, is counted from input_ids by default, and must be given with
        `past_key_values`, which transformers calls `cache` from 5.24 on. Raises ValueError.
        """
        assert return_dict, "transformers' generate asks for an output object, and there is no other form"
        cache = past_key_values if cache is None else cache
        if pixel_values is not None:
            if input_ids is None:
                raise ValueError("pixel_values: input_ids says which sample has which picture, and is not given")
            media = {**(media or {}), self.picture_key: by_sample(pixel_values, self._pictures(input_ids))}
        if media is not None:
            features = self._features(media)  # (B, T, F, P, D) of pictures
            if features_only:
                return MediaOutput(vision_features=features["vision"])
            media_tokens = self._encode(features)  # (B, T, N, D)
        if input_ids is None:
            return MediaOutput(media_tokens=media_tokens)
        if media_time is None:
            if cache is not None:
                raise ValueError("media_time: needed with past_key_values, since earlier tokens are not in input_ids")
            media_time = self._media_time(input_ids)  # (B, L)
            has_values = type(input_ids) is torch.Tensor and not input_ids.is_meta
            # On a GPU, reading the ids would wait for all queued work.
            if has_values and (media_tokens is None or input_ids.device.type == "cpu"):
                self._check(input_ids, media_tokens)
        return self._with_loss(
            labels,
            loss_positions,
            input_ids,
            media_tokens,
            media_time,
            attention_mask=attention_mask,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: cache},
            **self._positions(input_ids, attention_mask),
        )

    def _with_loss(
        self,
        labels: torch.Tensor | None,
        loss_positions: torch.Tensor | None,
        input_ids: torch.Tensor,
        media_tokens: Any,
        media_time: torch.Tensor,
        **kwargs: Any,
    ) -> MediaOutput:
        """Decode, and return the loss if there are labels: the head's own, or that of the logits."""
        in_head = labels is not None and not self.whole_logits and not kwargs["logits_to_keep"]
        with self._loss_in_head(labels, loss_positions) if in_head else nullcontext():
            out = self._decode(input_ids, media_tokens, media_time, **kwargs)  # logits (B, L, V)
        loss = None
        if in_head and labels is not None:
            loss, out.logits = mean_of(out.logits, labels), None
        elif labels is not None:
            loss = next_token_loss(out.logits, self._learned(labels))
        return MediaOutput(loss=loss, logits=out.logits, media_tokens=media_tokens, **{CACHE: getattr(out, CACHE)})

    def _loss_in_head(self, labels: Any, positions: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the language model returns the sum of its losses, (), in place of logits."""
        return targets_in_head(self.language_model, labels, next_tokens(self._learned(labels)), positions)

    def _learned(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the labels (B, L) that the loss is a mean over; -100 for the others."""
        return labels

    def _positions(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return position_ids (B, L) that do not depend on the side of the padding, if the language model takes any."""
        if mask is None or "position_ids" not in forward_arguments(self.language_model):
            return {}
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        return {"position_ids": positions[:, -input_ids.shape[1] :]}

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        media: Mapping[str, torch.Tensor] | None = None,
        max_new_tokens: int = 32,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return (B, L + up to max_new_tokens), padded on the right, from prompts (B, L), padded on the left.

        Greedy, and stops at end-of-chunk or the tokenizer's own end. Keywords are the ones of transformers' `generate`
        (num_beams, do_sample, synced_gpus, ...); `media_tokens` may replace `media`. Raises ValueError.
        """
        if media is not None:
            kwargs["media_tokens"] = self(media=media).media_tokens
        self._check(input_ids, kwargs.get("media_tokens"))
        if attention_mask is None:
            attention_mask = (input_ids != self.tokens.pad).long()
        if not attention_mask[:, -1].all():
            raise ValueError("attention_mask: a prompt ends in padding; pad prompts on the left")
        eos = self.generation_config.eos_token_id
        ends = [self.tokens.end_of_chunk, *(eos if isinstance(eos, list) else [eos])]
        options = {
            "pad_token_id": self.tokens.pad,
            "eos_token_id": [end for end in ends if end is not None and end >= 0] or None,
            "do_sample": False,
            "suppress_tokens": self.placeholder_ids,
            "max_new_tokens": max_new_tokens,
        }
        return super().generate(input_ids, attention_mask=attention_mask, **{**options, **kwargs})  # type: ignore[return-value]

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return one step's forward arguments; input_ids holds all tokens so far. Called by transformers."""
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "media_time": self._media_time(input_ids)[:, -inputs["input_ids"].shape[1] :]}

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Repeat each row for its beams, of nested media tokens too. Called by transformers."""
        tokens = kwargs.pop("media_tokens", None)
        ids, expanded = super()._expand_inputs_for_generation(expand_size, *args, **kwargs)  # type: ignore[misc]
        expanded["media_tokens"] = tree_map(lambda t: t.repeat_interleave(expand_size, dim=0), tokens)
        return ids, expanded

    def train(self, mode: bool = True) -> MediaModel:
        """Set train mode, but frozen modules stay in eval mode: no dropout, no update of batch norms."""
        super().train(mode)
        if mode:
            for part in self.children():
                keep_frozen_in_eval(part)
        return self


def by_sample(pixel_values: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """Return pictures (all, C, H, W) as (B, T, 1, C, H, W): T as many as the fullest sample has, blank ones in others.

    pictures: (B,) how many each sample has. T is at least 1, so that every rank enters the encoder. Raises ValueError
    if there are more or fewer pictures than that.
    """
    samples, total = len(pictures), len(pixel_values)
    if pixel_values.ndim != 4:
        raise ValueError(f"pixel_values: {tuple(pixel_values.shape)} must be (pictures, C, H, W)")
    has_values = type(pictures) is torch.Tensor and not pictures.is_meta
    # Without values, as in a plan, the shapes of the most even distribution are as good as any.
    counts = pictures.tolist() if has_values else [-(-total // samples)] * samples
    if has_values and sum(counts) != total:
        raise ValueError(f"pixel_values: {total} pictures, but input_ids has the placeholders of {sum(counts)}")
    most = max([1, *counts])
    if total == samples * most:
        return pixel_values.unflatten(0, (samples, most))[:, :, None]
    places: list[int] = []
    for sample, count in enumerate(counts):
        places.extend(range(sample * most, sample * most + count))
    padded = pixel_values.new_zeros(samples * most, *pixel_values.shape[1:])
    padded[places[:total]] = pixel_values
    return padded.unflatten(0, (samples, most))[:, :, None]


def keep_frozen_in_eval(part: nn.Module) -> None:
    """Set eval mode for the modules in a part that hold frozen parameters, and train mode for others.

    A module without parameters, such as a dropout, follows a trained sibling, such as an adapter.
    """
    for module in part.modules():
        if all(p.requires_grad for p in module.parameters()):
            continue
        module.training = False
        without_parameters, beside_trained = [], False
        for child in module.children():
            parameters = list(child.parameters())
            if not parameters:
                without_parameters.append(child)
            elif all(p.requires_grad for p in parameters):
                beside_trained = True
        for child in without_parameters:
            child.train(beside_trained)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (B, L, V) over labels (B, L) that are not -100; 0 if there are none.

    The label at a position is predicted from the position before.
    """
    targets = labels[:, 1:].flatten()  # (B*(L-1),)
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
