"""MultimodalModel: encoders and projectors, whose tokens replace placeholders among a language model's text tokens
(LLaVA, Liu et al. 2023).

B batch, L tokens, T items (pictures, sounds) of a sample, P tokens of an item from its encoder, of width D, N tokens of
an item from its projector, E width of the language model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...params import ParamError, ProjectorKind
from .backbones import check_language, output_shape
from .encoders import as_weights, encoder_of
from .media_model import MediaModel
from .tokens import TokenIds


@dataclass(frozen=True)
class ModalEncoder:
    """An encoder, and the projector of its tokens to the language model's width."""

    encoder: nn.Module
    """A vision model of transformers, a VisionEncoder, or a module with its attributes `item_shape`, `num_tokens` and
    `dim`. Its parts may be sharded already."""

    projector: ProjectorKind | str | nn.Module = ProjectorKind.MLP
    """linear, mlp (LLaVA 1.5's), or a module: (items, P, D) -> (items, N, E)."""


class MultimodalModel(MediaModel):
    """Predict the next tokens of text with pictures, sounds, ...

    Each item is announced in input_ids by as many placeholder ids as it has tokens (`num_tokens`); labels that are
    placeholders count as -100. Parameters are called encoders.<key>.*, projectors.<key>.* and language_model.*. All
    encoders run before the first projector, and each runs in every forward with media, so every rank enters every unit,
    whatever its samples hold. Raises ValueError if the widths of an encoder, its projector and the language model do
    not fit.
    """

    own_modules = frozenset({"projectors"})

    def __init__(
        self,
        encoders: Mapping[str, ModalEncoder | nn.Module],
        language_model: Any,
        *,
        placeholders: Mapping[str, int] | None = None,
    ):
        """encoders: by key, with their projectors; for an encoder alone, a projector is made as ModalEncoder makes it.

        placeholders: token id by key; default the ids after the vocabulary, in order.
        """
        super().__init__()
        check_language(language_model)
        parts = {key: with_encoder(key, part) for key, part in encoders.items()}
        with next(language_model.parameters()).device:
            self.encoders = nn.ModuleDict({key: part.encoder for key, part in parts.items()})
            width = language_model.get_input_embeddings().weight.shape[1]  # OPT's may be less than its hidden_size
            self.projectors = nn.ModuleDict({key: build_projector(part, width) for key, part in parts.items()})
            self.language_model = language_model
        self.num_tokens: dict[str, int] = {}
        """Placeholders of one item, by key."""
        for key in encoders:
            self.num_tokens[key] = projected_tokens(key, self.projectors[key], self.encoders[key], width)
        vocabulary = language_model.config.get_text_config().vocab_size
        self.placeholders = dict(placeholders or {key: vocabulary + i for i, key in enumerate(encoders)})
        if self.placeholders.keys() != encoders.keys():
            raise ValueError(f"placeholders: {self.placeholders} must have the keys of encoders, {', '.join(encoders)}")
        self.placeholder_ids = list(self.placeholders.values())
        config = language_model.generation_config
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        end = -1 if end is None else end
        pad = max(end, 0) if config.pad_token_id is None else config.pad_token_id
        self.tokens = TokenIds(image=-1, end_of_chunk=end, pad=pad, known=vocabulary, new=0)

    def __getattr__(self, name: str) -> Any:
        """Return an encoder with its projector for Cornstarch's name of it, such as `vision_encoder`."""
        key = name.removesuffix("_encoder")
        if key != name and key in self.encoders:
            return ModalEncoder(self.encoders[key], self.projectors[key])
        return super().__getattr__(name)

    @property
    def picture_key(self) -> str:
        """Return the key of the first encoder that takes pictures (3, H, W)."""
        for key, encoder in self.encoders.items():
            item: Any = encoder.item_shape
            if len(item) == 3:
                return key
        raise ValueError(f"pixel_values: no encoder takes pictures; there are {', '.join(self.encoders)}")

    def _pictures(self, input_ids: torch.Tensor) -> torch.Tensor:
        key = self.picture_key
        return (input_ids == self.placeholders[key]).sum(dim=1) // self.num_tokens[key]  # (B,)

    def _learned(self, labels: torch.Tensor) -> torch.Tensor:
        for placeholder in self.placeholder_ids:  # it may lie outside the vocabulary
            labels = labels.masked_fill(labels == placeholder, -100)
        return labels

    def count_label_tokens(self, batch: Any) -> int:
        """Return the labels that the loss is a mean over: all but the first of a sequence, and but placeholders."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else batch.inputs().get("labels")
        return 0 if labels is None else int((self._learned(labels)[:, 1:] != -100).sum())

    def _features(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = {}
        for key, encoder in self.encoders.items():
            if f"{key}_features" in media:
                features[key] = media[f"{key}_features"]
                continue
            item: tuple[int, ...] = encoder.item_shape  # type: ignore[assignment]
            lead = media[key].ndim - len(item) if key in media else 0  # (B, T) or, of pictures, (B, T, F)
            if lead not in (2, 3):
                shapes = {name: tuple(value.shape) for name, value in media.items()}
                raise ValueError(f"media: {shapes} must have {key} of (batch, items, {', '.join(map(str, item))})")
            encoded = encoder(media[key].flatten(0, lead - 1))  # (items of the batch, P, D)
            features[key] = encoded.unflatten(0, media[key].shape[:lead])
        unknown = [name for name in media if name.removesuffix("_features") not in features]
        if unknown:
            raise ValueError(f"media: no encoder for {', '.join(unknown)}; there are {', '.join(features)}")
        return features

    def _encode(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = {}
        for key, encoded in features.items():
            projected = self.projectors[key](encoded.flatten(0, -3))  # (B*T, N, E)
            tokens[key] = projected.unflatten(0, (len(encoded), -1)).flatten(1, 2)  # (B, T*N, E)
        return tokens

    def _media_time(self, input_ids: torch.Tensor) -> torch.Tensor:
        time = torch.zeros_like(input_ids)
        for token in self.placeholders.values():
            is_placeholder = input_ids == token
            time = torch.where(is_placeholder, is_placeholder.cumsum(dim=1), time)
        return time  # (B, L): 0 at text

    def _check(self, input_ids: torch.Tensor, media_tokens: dict[str, torch.Tensor] | None) -> None:
        for key, token in self.placeholders.items():
            available = 0
            if media_tokens is not None:
                samples, available = media_tokens[key].shape[:2]
                if samples != len(input_ids):
                    raise ValueError(f"media: {key} for {samples} samples, but input_ids has {len(input_ids)}")
            each = self.num_tokens[key]
            for i, count in enumerate((input_ids == token).sum(dim=1).tolist()):
                if count % each or count > available:
                    words = f"media: sample {i} has {count} placeholder tokens of {key} in input_ids, but "
                    raise ValueError(words + f"{available // each} items of {each} tokens each")

    def _decode(
        self,
        input_ids: torch.Tensor,
        media_tokens: dict[str, torch.Tensor] | None,
        media_time: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        if media_tokens is None:
            return self.language_model(input_ids=input_ids, **kwargs)
        vectors: torch.Tensor | None = None
        for key, token in self.placeholders.items():
            tokens = media_tokens[key]  # (B, T*N, E)
            index = (media_time - 1).clamp(0, tokens.shape[1] - 1)  # (B, L); of no use where no placeholder is
            own = tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))  # (B, L, E)
            vectors = own if vectors is None else torch.where((input_ids == token)[..., None], own, vectors)
        assert vectors is not None
        with _replaced_embeddings(self.language_model.get_input_embeddings(), media_time > 0, vectors):
            return self.language_model(input_ids=input_ids, **kwargs)


def with_encoder(key: str, part: ModalEncoder | nn.Module) -> ModalEncoder:
    """Return an encoder that has `item_shape`, `num_tokens` and `dim`, with its projector.

    key: the encoder's name in errors. Raises ParamError for a module that has none of these and is no vision model of
    transformers.
    """
    if not isinstance(part, ModalEncoder):
        part = ModalEncoder(part)
    if hasattr(part.encoder, "item_shape"):
        return part
    if not isinstance(part.encoder, PreTrainedModel):
        words = f"{type(part.encoder).__name__} has no item_shape, num_tokens and dim, and is no vision model of "
        raise ParamError(f"encoders.{key}", words + "transformers; give it these attributes")
    try:
        return replace(part, encoder=encoder_of(part.encoder))
    except ParamError as error:
        raise error.under(f"encoders.{key}") from None


@contextmanager
def _replaced_embeddings(embedding: nn.Module, where: torch.Tensor, vectors: torch.Tensor) -> Iterator[None]:
    """Let the embedding return `vectors` (B, L, E) at `where` (B, L).

    So text is embedded inside the language model's own forward, as FSDP requires of a unit that holds both.
    """

    def mask_ids(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].masked_fill(where, 0), *args[1:])  # placeholders may lie outside the table

    def replace(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where(where[..., None], vectors.to(out.dtype), out)

    # A handle of a hook removes it at the end of a `with` block.
    with embedding.register_forward_pre_hook(mask_ids), embedding.register_forward_hook(replace):
        yield


def build_projector(part: ModalEncoder, width: int) -> nn.Module:
    """Return a module (items, P, D) -> (items, P, E = width). Raises ValueError for an unknown kind."""
    if isinstance(part.projector, nn.Module):
        return part.projector
    dim: Any = part.encoder.dim
    if part.projector == ProjectorKind.LINEAR:
        return nn.Linear(dim, width)
    if part.projector == ProjectorKind.MLP:  # LLaVA 1.5's, with the names that transformers gives it
        layers = {"linear_1": nn.Linear(dim, width), "act": nn.GELU(), "linear_2": nn.Linear(width, width)}
        return nn.Sequential(OrderedDict(layers))
    raise ValueError(f"projector: {part.projector!r} is not one of {', '.join(ProjectorKind)}, nor a module")


def projected_tokens(key: str, projector: nn.Module, encoder: Any, width: int) -> int:
    """Return N, the tokens that a projector makes of one item. Raises ValueError if it gives another width."""
    example = as_weights(torch.empty(2, encoder.num_tokens, encoder.dim, device="meta"), projector)
    shape = output_shape(projector, example)
    if len(shape) != 3 or (shape[0], shape[2]) != (2, width):
        expected = f"must turn {tuple(example.shape)} (items, tokens, features) into (2, tokens, {width})"
        raise ValueError(f"encoders.{key}: the projector {type(projector).__name__} {expected}, not {tuple(shape)}")
    return shape[1]
