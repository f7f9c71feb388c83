"""Flamingo: a vision encoder, a perceiver resampler and a causal LM with gated cross-attention between its layers.

B batch, L tokens, T pictures of a sample, F frames, P patches of a frame, N latents of a picture, C, H and W channels
and pixels, D width of the vision encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...params import ParamError
from ...params.base import did_you_mean
from .backbones import check_language, run_on_meta
from .cross_attention import FlamingoLayer, GatedCrossAttention, media_bias, media_mask
from .encoders import VisionEncoder
from .media_model import MediaModel
from .perceiver import PerceiverResampler
from .tokens import TokenIds, extend_vocabulary, merge_vocabulary


class Flamingo(MediaModel):
    """Predict the next tokens of text with pictures (Alayrac et al. 2022), with the arithmetic of OpenFlamingo.

    Changes the language model in place: its layers, embeddings and head are wrapped. Gates start at 0, so a new model's
    logits are the language model's.
    """

    own_modules = frozenset({"perceiver", "cross_attention"})

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
        decoder_layers_name: str | None = None,
    ):
        super().__init__()
        check_language(language_model)
        self.tokens, self.cross_attend_all = tokens, cross_attend_all
        self.placeholder_ids = [tokens.image]
        shape = {"heads": attention_heads, "head_dim": attention_head_dim}
        with next(language_model.parameters()).device:
            self.vision_encoder = vision_encoder
            self.perceiver = PerceiverResampler(
                vision_encoder.dim, num_latents=num_latents, depth=perceiver_depth, **shape
            )
            self.language_model = language_model
            extend_vocabulary(language_model, tokens)
            self.layers_name, layers = decoder_layers(language_model, decoder_layers_name)
            dim = language_model.config.get_text_config().hidden_size
            for i, layer in enumerate(layers):
                crosses = (i + 1) % cross_attention_every == 0
                cross = GatedCrossAttention(dim, media_dim=vision_encoder.dim, **shape) if crosses else None
                layers[i] = FlamingoLayer(layer, cross)
        self._passes_to_layers = passes_to_layers(language_model, layers[0], media=None, media_mask=None)

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder's layers, in order; each a FlamingoLayer, or a wrapper around one."""
        layers = self.language_model.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def take_language_model(self) -> PreTrainedModel:
        """Return the language model without cross-attention, and with the new tokens as its tables' last rows."""
        layers = self.layers
        for i, layer in enumerate(layers):
            layers[i] = layer.decoder_layer  # type: ignore[assignment]
        merge_vocabulary(self.language_model, self.tokens)
        return self.language_model

    def _pictures(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids == self.tokens.image).sum(dim=1)  # (B,)

    def _features(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if set(media) == {"vision_features"} and media["vision_features"].ndim == 5:
            return {"vision": media["vision_features"]}  # (B, T, F, P, D)
        if set(media) != {"vision"} or media["vision"].ndim != 6:
            shapes = {key: tuple(value.shape) for key, value in media.items()}
            raise ValueError(f"media: {shapes} must be one tensor, vision, of (batch, pictures, frames, C, H, W)")
        pictures = media["vision"]  # (B, T, F, C, H, W)
        features = self.vision_encoder(pictures.flatten(0, 2))  # (B*T*F, P, D)
        return {"vision": features.unflatten(0, pictures.shape[:3])}  # (B, T, F, P, D)

    def _encode(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.perceiver(features["vision"])  # (B, T, N, D)

    def _media_time(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids == self.tokens.image).cumsum(dim=1)  # (B, L)

    def _check(self, input_ids: torch.Tensor, media_tokens: torch.Tensor | None) -> None:
        pictures = 0 if media_tokens is None else media_tokens.shape[1]
        placeholders = int((input_ids == self.tokens.image).sum(dim=1).max())
        if placeholders > pictures:
            raise ValueError(f"media: a sample has {placeholders} image tokens in input_ids but {pictures} pictures")

    def _decode(
        self, input_ids: torch.Tensor, media_tokens: torch.Tensor | None, media_time: torch.Tensor, **kwargs: Any
    ) -> Any:
        extra: dict[str, Any] = {"media": None, "media_mask": None}
        if media_tokens is not None:
            if len(media_tokens) != len(input_ids):
                raise ValueError(f"media: pictures for {len(media_tokens)} samples, but input_ids has {len(input_ids)}")
            pictures, latents = media_tokens.shape[1:3]
            mask = media_mask(media_time, pictures=pictures, latents=latents, attend_all=self.cross_attend_all)
            media = media_tokens.flatten(1, 2)  # (B, T*N, D)
            extra = {"media": media, "media_mask": media_bias(mask, media.dtype)}
        if self._passes_to_layers:
            return self.language_model(input_ids=input_ids, **kwargs, **extra)
        with extra_arguments(self.layers, **extra):
            return self.language_model(input_ids=input_ids, **kwargs)

    def wrap_fsdp(self, wrapper_kwargs: dict[str, Any], device_id: torch.device) -> None:
        """Wrap with FSDP1 in place, as OpenFlamingo's method of this name does; set the optimizer up afterwards.

        The vision encoder, the perceiver, each gated cross-attention and each decoder layer become units, made with
        `wrapper_kwargs` (mixed_precision, sharding_strategy, ...); all other modules are moved to `device_id` and
        replicated, with gradients averaged. Nothing changes `requires_grad`. `mmfsdp.wrap_fsdp` plans better units.
        Raises ValueError if the model is wrapped already.
        """
        from ..compat.openflamingo import wrap_flamingo  # models know nothing of ranks but for this method

        wrap_flamingo(self, wrapper_kwargs, device_id)


# ---- the layers of a decoder, found by structure ----


def decoder_layers(model: PreTrainedModel, name: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the dotted name of the list of decoder layers, and the list.

    It is the list of that name, else the only outermost ModuleList of as many modules as the configuration has layers.
    Raises ParamError naming the lists that the model has.
    """
    lists = {key: module for key, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    if name is not None:
        if name not in lists:
            raise ParamError("decoder_layers", f"{name!r} is not a list of layers{did_you_mean(name, lists)}")
        return name, lists[name]
    outermost = dict(lists)
    for key in lists:
        if any(key.startswith(f"{other}.") for other in lists):
            del outermost[key]
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    matching = [(key, layers) for key, layers in outermost.items() if len(layers) == count]
    if len(matching) != 1:
        shown = ", ".join(f"{key} ({len(layers)})" for key, layers in outermost.items()) or "none"
        words = f"looked in {type(model).__name__} for one list of {count} layers (num_hidden_layers), "
        words += f"found {len(matching)}; its lists are {shown}"
        raise ParamError("decoder_layers", f"{words}; set decoder_layers to the right name")
    return matching[0]


def passes_to_layers(model: PreTrainedModel, layer: nn.Module, **extra: Any) -> bool:
    """Return whether keyword arguments of the model's forward reach `layer`, by a forward on the meta device."""
    received: set[str] = set()

    def note(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        received.update(kwargs)
        raise _LayerReached

    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with layer.register_forward_pre_hook(note, with_kwargs=True):
        try:
            # With a cache, because without one transformers looks into position_ids, which meta tensors forbid.
            run_on_meta(model, input_ids=ids, use_cache=True, **extra)
        except (_LayerReached, TypeError):  # TypeError: refused by the model's forward
            pass
    return received >= extra.keys()


class _LayerReached(Exception):
    """Ends a forward at the layer that it was run for: all that comes after it takes time for nothing."""


@contextmanager
def extra_arguments(layers: nn.ModuleList, **extra: Any) -> Iterator[None]:
    """Add keyword arguments to each layer's, for decoders that do not pass theirs on (MPT, Bloom).

    They enter the outermost module in the list, so that activation checkpointing recomputes with them.
    """

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **extra}

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(add, with_kwargs=True))
        yield
