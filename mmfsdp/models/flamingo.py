"""Flamingo: a vision encoder, a perceiver resampler and a causal LM with gated cross-attention between its layers.

B batch, L tokens, T pictures of a sample, F frames, N latents of a picture, D width of the vision encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from .cross_attention import FlamingoLayer, GatedCrossAttention, media_mask
from .decoder import decoder_layers, handing_down, hands_down
from .perceiver import PerceiverResampler
from .tokens import TokenIds, extend_vocabulary
from .vision import VisionEncoder


@dataclass
class FlamingoOutput(ModelOutput):
    """What `Flamingo.forward` gives."""

    loss: torch.Tensor | None = None
    """Mean over the labels that count; a scalar."""
    logits: torch.Tensor | None = None
    """(B, L, known + new tokens)."""
    past_key_values: Any = None
    """The KV cache, with `use_cache`."""
    media_tokens: torch.Tensor | None = None
    """(B, T, N, D): what the perceiver made of the pictures; can be given again instead of `media`."""
    vision_features: torch.Tensor | None = None
    """(B, T, F, P, D): what the vision encoder made of P patches, with `features_only`."""


class Flamingo(GenerationMixin, nn.Module):
    """Text with pictures in, the next tokens out (Alayrac et al. 2022), with the arithmetic of OpenFlamingo.

    Takes the language model over: its layers, embeddings and head are wrapped in place. Gates start at 0, so that a new
    model says what the language model says.
    """

    main_input_name = "input_ids"
    _is_stateful = False

    def __init__(
        self,
        vision_encoder: VisionEncoder,
        language_model: PreTrainedModel,
        *,
        tokens: TokenIds,
        cross_attention_every: int = 1,
        cross_attend_all: bool = False,
        num_latents: int = 64,
        perceiver_depth: int = 6,
        attention_heads: int = 8,
        attention_head_dim: int = 64,
        max_images: int | None = None,
        max_frames: int | None = None,
        decoder_layers_name: str | None = None,
    ):
        super().__init__()
        self.tokens, self.cross_attend_all = tokens, cross_attend_all
        shape = {"heads": attention_heads, "head_dim": attention_head_dim}
        with next(language_model.parameters()).device:
            self.vision_encoder = vision_encoder
            self.perceiver = PerceiverResampler(
                vision_encoder.dim,
                num_latents=num_latents,
                depth=perceiver_depth,
                max_images=max_images,
                max_frames=max_frames,
                **shape,
            )
            self.language_model = language_model
            extend_vocabulary(language_model, tokens)
            self.layers_name, layers = decoder_layers(language_model, decoder_layers_name)
            dim = language_model.config.get_text_config().hidden_size
            for i, layer in enumerate(layers):
                crosses = (i + 1) % cross_attention_every == 0
                cross = GatedCrossAttention(dim, media_dim=vision_encoder.dim, **shape) if crosses else None
                layers[i] = FlamingoLayer(layer, cross)
        self._hands_down = hands_down(language_model, layers[0], media=None, media_mask=None)
        self._takes_positions = "position_ids" in inspect.signature(language_model.forward).parameters

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # transformers' generate asks much: device, dtype, config, generation_config, ...
            return getattr(super().__getattr__("language_model"), name)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, in order; each a FlamingoLayer, or what a wrapper has put around it."""
        layers = self.language_model.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        media: Mapping[str, torch.Tensor] | None = None,
        media_tokens: torch.Tensor | None = None,
        media_time: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        features_only: bool = False,
        return_dict: bool = True,
    ) -> FlamingoOutput:
        """input_ids (B, L), attention_mask (B, L or, with a cache, all so far), labels (B, L) with -100 where no loss.

        Pictures come as `media["vision"]` (B, T, F, C, H, W), as `media["vision_features"]` (B, T, F, P, D), or as the
        `media_tokens` of an earlier output; without input_ids they are only encoded, with `features_only` not even by
        the perceiver. `media_time` (B, L), pictures announced up to each token, is counted from
        input_ids unless given, and must be given with `past_key_values`. Raises ValueError.
        """
        assert return_dict, "transformers' generate asks for an output object, and there is no other form"
        if media is not None:
            features = self._features(media)
            if features_only:
                return FlamingoOutput(vision_features=features)
            media_tokens = self.perceiver(features)  # (B, T, N, D)
        if input_ids is None:
            return FlamingoOutput(media_tokens=media_tokens)
        if media_time is None:
            if past_key_values is not None:
                raise ValueError("media_time: needed with past_key_values, since earlier tokens are not in input_ids")
            media_time = (input_ids == self.tokens.image).cumsum(dim=1)
            if media_tokens is None and type(input_ids) is torch.Tensor and not input_ids.is_meta:  # it has values
                self._check_pictures(input_ids, 0)
        out = self._decode(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **self._seen(input_ids, media_tokens, media_time),
        )
        loss = None if labels is None else next_token_loss(out.logits, labels)
        return FlamingoOutput(
            loss=loss, logits=out.logits, past_key_values=out.past_key_values, media_tokens=media_tokens
        )

    def _features(self, media: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if set(media) == {"vision_features"} and media["vision_features"].ndim == 5:
            return media["vision_features"]
        if set(media) != {"vision"} or media["vision"].ndim != 6:
            shapes = {key: tuple(value.shape) for key, value in media.items()}
            raise ValueError(f"media: {shapes} must be one tensor, vision, of (batch, pictures, frames, C, H, W)")
        pictures = media["vision"]
        return self.vision_encoder(pictures.flatten(0, 2)).unflatten(0, pictures.shape[:3])  # (B, T, F, P, D)

    def _check_pictures(self, input_ids: torch.Tensor, pictures: int) -> None:
        most = int((input_ids == self.tokens.image).sum(dim=1).max())
        if most > pictures:
            raise ValueError(f"media: a sample has {most} image tokens in input_ids but {pictures} pictures")

    def _seen(self, input_ids: torch.Tensor, media_tokens: torch.Tensor | None, media_time: torch.Tensor) -> dict:
        if media_tokens is None:
            return {"media": None, "media_mask": None}
        if len(media_tokens) != len(input_ids):
            raise ValueError(f"media: pictures for {len(media_tokens)} samples, but input_ids has {len(input_ids)}")
        pictures, latents = media_tokens.shape[1:3]
        mask = media_mask(media_time, pictures=pictures, latents=latents, attend_all=self.cross_attend_all)
        return {"media": media_tokens.flatten(1, 2), "media_mask": mask}

    def _decode(self, input_ids: torch.Tensor, *, media: Any, media_mask: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if self._takes_positions and mask is not None:  # so that the side of the padding does not matter
            positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
            kwargs["position_ids"] = positions[:, -input_ids.shape[1] :]
        passed = {"media": media, "media_mask": media_mask}
        if self._hands_down:
            return self.language_model(input_ids=input_ids, **kwargs, **passed)
        with handing_down(self.layers, **passed):
            return self.language_model(input_ids=input_ids, **kwargs)

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
        tokens = kwargs.get("media_tokens")
        self._check_pictures(input_ids, 0 if tokens is None else tokens.shape[1])
        if attention_mask is None:
            attention_mask = (input_ids != self.tokens.pad).long()
        if not attention_mask[:, -1].all():
            raise ValueError("attention_mask: a prompt ends in padding; pad prompts on the left")
        eos = self.generation_config.eos_token_id
        ends = [self.tokens.end_of_chunk, *(eos if isinstance(eos, list) else [eos] if eos is not None else [])]
        defaults = {"pad_token_id": self.tokens.pad, "eos_token_id": ends, "suppress_tokens": [self.tokens.image]}
        defaults["do_sample"] = False
        return super().generate(  # type: ignore[return-value]
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **{**defaults, **kwargs}
        )

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """One step's forward arguments; input_ids holds all tokens so far. Called by transformers' `generate`."""
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        time = (input_ids == self.tokens.image).cumsum(dim=1)
        return {**inputs, "media_time": time[:, -inputs["input_ids"].shape[1] :]}

    def train(self, mode: bool = True) -> Flamingo:
        """As torch's, but what is frozen stays in eval mode: no dropout, no batch-norm update."""
        super().train(mode)
        for part in (self.vision_encoder, self.language_model) if mode else ():
            part.eval()
            for module in part.modules():
                grads = [p.requires_grad for p in module.parameters()]
                if grads and all(grads):
                    module.train()
        return self


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits (B, L, vocabulary) over labels (B, L) that are not -100; 0 where there are none.

    The label at a position is predicted from the position before.
    """
    targets = labels[:, 1:].flatten()
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
