"""What all models that put media into a language model share: forward, generation, the loss, train and eval mode.

B batch, L tokens, T pictures or sounds of a sample, N tokens of each, D width.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from transformers import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from ..params import ParamError
from .tokens import TokenIds


@dataclass
class MediaOutput(ModelOutput):
    """What `forward` gives."""

    loss: torch.Tensor | None = None
    """Mean over the labels that count; a scalar."""
    logits: torch.Tensor | None = None
    """(B, L, vocabulary)."""
    past_key_values: Any = None
    """The KV cache, with `use_cache`."""
    media_tokens: Any = None
    """What was made of the media; can be given again instead of `media`. Flamingo's is (B, T, N, D), MultimodalModel's
    (B, T*N, D) by key."""
    vision_features: torch.Tensor | None = None
    """(B, T, F, P, D): what the vision encoder made of P patches, with `features_only`."""


class MediaModel(GenerationMixin, nn.Module, ABC):
    """A language model that is given pictures or sounds as well as text."""

    main_input_name = "input_ids"
    _is_stateful = False
    language_model: Any
    tokens: TokenIds

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MediaModel:
        """The model in a folder that `mmfsdp export` wrote, in eval mode. Raises ParamError where it holds another."""
        from ..export import load_pretrained  # late: it builds models, and so imports them

        model, _ = load_pretrained(Path(folder))
        if not isinstance(model, cls):
            raise ParamError("folder", f"{str(folder)!r} holds a {type(model).__name__}, not a {cls.__name__}")
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # transformers' generate asks much: device, dtype, config, generation_config, ...
            return getattr(super().__getattr__("language_model"), name)

    @abstractmethod
    def _features(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the encoders make of the media, by key: (B, T, F, P, D) of pictures. Raises ValueError."""

    @abstractmethod
    def _encode(self, features: dict[str, torch.Tensor]) -> Any:
        """Media tokens."""

    @abstractmethod
    def _time(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L): how many placeholders there are up to each token."""

    @abstractmethod
    def _check(self, input_ids: torch.Tensor, media_tokens: Any) -> None:
        """Raise ValueError where the placeholders in input_ids are not those of the media."""

    @abstractmethod
    def _decode(self, input_ids: torch.Tensor, media_tokens: Any, media_time: torch.Tensor, **kwargs: Any) -> Any:
        """The language model's output."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        media: Mapping[str, torch.Tensor] | None = None,
        media_tokens: Any = None,
        media_time: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        features_only: bool = False,
        return_dict: bool = True,
    ) -> MediaOutput:
        """input_ids (B, L), attention_mask (B, L or, with a cache, all so far), labels (B, L) with -100 where no loss.

        Pictures come as `media["vision"]` (B, T, F, C, H, W), as `media["vision_features"]` (B, T, F, P, D), or as the
        `media_tokens` of an earlier output; without input_ids they are only encoded, with `features_only` not even
        made into media tokens. `media_time` (B, L), placeholders up to each token, is counted from input_ids unless
        given, and must be given with `past_key_values`. Raises ValueError.
        """
        assert return_dict, "transformers' generate asks for an output object, and there is no other form"
        if media is not None:
            features = self._features(media)
            if features_only:
                return MediaOutput(vision_features=features["vision"])
            media_tokens = self._encode(features)
        if input_ids is None:
            return MediaOutput(media_tokens=media_tokens)
        if media_time is None:
            if past_key_values is not None:
                raise ValueError("media_time: needed with past_key_values, since earlier tokens are not in input_ids")
            media_time = self._time(input_ids)
            has_values = type(input_ids) is torch.Tensor and not input_ids.is_meta
            if has_values and (media_tokens is None or input_ids.device.type == "cpu"):  # on a GPU, reading them waits
                self._check(input_ids, media_tokens)
        out = self._decode(
            input_ids,
            media_tokens,
            media_time,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **self._positions(input_ids, attention_mask),
        )
        loss = None if labels is None else next_token_loss(out.logits, labels)
        return MediaOutput(loss=loss, logits=out.logits, past_key_values=out.past_key_values, media_tokens=media_tokens)

    def _positions(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Positions that do not depend on the side of the padding, for language models that take them."""
        if mask is None or not takes_positions(self.language_model):
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
        """Prompts (B, L), padded on the left, -> (B, L + up to max_new_tokens), prompt included, padded on the right.

        Greedy, and stops at end-of-chunk or the tokenizer's own end. Keywords are those of transformers' `generate`
        (num_beams, do_sample, synced_gpus, ...); `media_tokens` may stand for `media`. Raises ValueError.
        """
        if media is not None:
            kwargs["media_tokens"] = self(media=media).media_tokens
        self._check(input_ids, kwargs.get("media_tokens"))
        if attention_mask is None:
            attention_mask = (input_ids != self.tokens.pad).long()
        if not attention_mask[:, -1].all():
            raise ValueError("attention_mask: a prompt ends in padding; pad prompts on the left")
        eos = self.generation_config.eos_token_id
        ends = [self.tokens.end_of_chunk, *(eos if isinstance(eos, list) else [eos] if eos is not None else [])]
        ends = [end for end in ends if end >= 0]
        defaults = {"pad_token_id": self.tokens.pad, "eos_token_id": ends or None, "do_sample": False}
        defaults["suppress_tokens"] = self._placeholders()
        return super().generate(  # type: ignore[return-value]
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **{**defaults, **kwargs}
        )

    def _placeholders(self) -> list[int]:
        return [self.tokens.image]

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """One step's forward arguments; input_ids holds all tokens so far. Called by transformers' `generate`."""
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "media_time": self._time(input_ids)[:, -inputs["input_ids"].shape[1] :]}

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """One row per beam, of nested media tokens too. Called by transformers' `generate`."""
        tokens = kwargs.pop("media_tokens", None)
        ids, expanded = super()._expand_inputs_for_generation(expand_size, *args, **kwargs)  # type: ignore[misc]
        expanded["media_tokens"] = tree_map(lambda t: t.repeat_interleave(expand_size, dim=0), tokens)
        return ids, expanded

    def train(self, mode: bool = True) -> MediaModel:
        """As torch's, but what is frozen stays in eval mode: no dropout, no batch-norm update."""
        super().train(mode)
        for part in self.children() if mode else ():
            train_unfrozen(part)
        return self


def train_unfrozen(module: nn.Module) -> None:
    """Train mode for modules whose parameters all train, eval mode for others; one without parameters (a dropout)
    goes with a trained one beside it (an adapter)."""
    grads: dict[nn.Module, set[bool]] = {}

    def look(module: nn.Module) -> set[bool]:
        own = {p.requires_grad for p in module._parameters.values() if p is not None}
        grads[module] = own.union(*map(look, module.children()))
        return grads[module]

    def switch(module: nn.Module, beside_trained: bool) -> None:
        module.training = grads[module] == {True} or (not grads[module] and beside_trained)
        trains = module.training or any(grads[child] == {True} for child in module.children())
        for child in module.children():
            switch(child, trains)

    look(module)
    switch(module, False)


def takes_positions(language_model: nn.Module) -> bool:
    """Whether the language model's forward, within adapters if it has any, takes `position_ids`."""
    inner = getattr(language_model, "get_base_model", lambda: language_model)()
    return "position_ids" in inspect.signature(inner.forward).parameters


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits (B, L, vocabulary) over labels (B, L) that are not -100; 0 where there are none.

    The label at a position is predicted from the position before.
    """
    targets = labels[:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
