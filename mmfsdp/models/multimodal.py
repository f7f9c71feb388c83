"""MultimodalModel: any encoders and projectors, whose tokens stand among a language model's text tokens (LLaVA, Liu et
al. 2023).

B batch, L tokens, T items (pictures, sounds) of a sample, N tokens of an item, E width of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..params import ProjectorKind
from .base import MediaModel
from .projectors import build_projector, embedding_width, projected_tokens
from .tokens import TokenIds


@dataclass(frozen=True)
class ModalEncoder:
    """An encoder, and what carries its tokens into the language model."""

    encoder: nn.Module
    """A VisionEncoder, an AudioEncoder, or a module with their attributes `item_shape`, `num_tokens` and `dim`."""

    projector: ProjectorKind | str | nn.Module = ProjectorKind.MLP
    """linear, mlp (LLaVA 1.5's), resampler (the perceiver), or a module: (N, P, D) -> (N, tokens, E)."""

    resampler: dict[str, int] = field(default_factory=dict)
    """The resampler's num_latents, depth, heads and head_dim, where not Flamingo's."""


class MultimodalModel(MediaModel):
    """Text with pictures, sounds, ... in, the next tokens out.

    Each item's place in input_ids is as many placeholder ids as it has tokens (`num_tokens`). Parameters are called
    encoders.<key>.*, projectors.<key>.* and language_model.*. Encoders all run before the first projector, and each
    runs in every forward that is given media: so every rank enters every unit, whatever its samples hold.
    Raises ValueError where an encoder, its projector and the language model do not fit, with both widths.
    """

    def __init__(
        self,
        encoders: Mapping[str, ModalEncoder],
        language_model: Any,
        *,
        placeholders: Mapping[str, int] | None = None,
    ):
        """placeholders: token id by key; default the ids after the vocabulary, in order."""
        super().__init__()
        with next(language_model.parameters()).device:
            self.encoders = nn.ModuleDict({key: part.encoder for key, part in encoders.items()})
            self.projectors = nn.ModuleDict(
                {key: _projector(part, embedding_width(language_model)) for key, part in encoders.items()}
            )
            self.language_model = language_model
        self.num_tokens = {
            key: projected_tokens(key, self.projectors[key], self.encoders[key], language_model) for key in encoders
        }
        """Placeholders of one item, by key."""
        vocabulary = language_model.config.get_text_config().vocab_size
        self.placeholders = dict(placeholders or {key: vocabulary + i for i, key in enumerate(encoders)})
        if self.placeholders.keys() != encoders.keys():
            raise ValueError(f"placeholders: {self.placeholders} must have the keys of encoders, {', '.join(encoders)}")
        self.tokens = _tokens(language_model)

    def _features(self, media: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for key, encoder in self.encoders.items():
            if f"{key}_features" in media:
                found[key] = media[f"{key}_features"]
                continue
            item: tuple[int, ...] = encoder.item_shape  # type: ignore[assignment]
            lead = media[key].ndim - len(item) if key in media else 0
            if lead not in (2, 3):
                shapes = {name: tuple(value.shape) for name, value in media.items()}
                raise ValueError(f"media: {shapes} must have {key} of (batch, items, {', '.join(map(str, item))})")
            found[key] = encoder(media[key].flatten(0, lead - 1)).unflatten(0, media[key].shape[:lead])
        unknown = [name for name in media if name.removesuffix("_features") not in found]
        if unknown:
            raise ValueError(f"media: no encoder for {', '.join(unknown)}; there are {', '.join(found)}")
        return found

    def _encode(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key: self.projectors[key](x.flatten(0, -3)).unflatten(0, (len(x), -1)).flatten(1, 2)  # (B, T*N, E)
            for key, x in features.items()
        }

    def _time(self, input_ids: torch.Tensor) -> torch.Tensor:
        time = torch.zeros_like(input_ids)
        for token in self.placeholders.values():
            here = input_ids == token
            time = torch.where(here, here.cumsum(dim=1), time)
        return time

    def _check(self, input_ids: torch.Tensor, media_tokens: dict[str, torch.Tensor] | None) -> None:
        for key, token in self.placeholders.items():
            given = None if media_tokens is None else media_tokens[key]
            if given is not None and len(given) != len(input_ids):
                raise ValueError(f"media: {key} for {len(given)} samples, but input_ids has {len(input_ids)}")
            each, most = self.num_tokens[key], 0 if given is None else given.shape[1]
            for i, count in enumerate((input_ids == token).sum(dim=1).tolist()):
                if count % each or count > most:
                    raise ValueError(
                        f"media: sample {i} has {count} placeholder tokens of {key} in input_ids, but was given "
                        f"{most // each} items of {each} tokens each"
                    )

    def _decode(
        self,
        input_ids: torch.Tensor,
        media_tokens: dict[str, torch.Tensor] | None,
        media_time: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        if media_tokens is None:
            return self.language_model(input_ids=input_ids, **kwargs)
        here = media_time > 0
        vectors = None
        for key, token in self.placeholders.items():
            tokens = media_tokens[key]
            place = (media_time - 1).clamp(0, tokens.shape[1] - 1)  # elsewhere whatever: it is not used there
            own = tokens.gather(1, place[..., None].expand(-1, -1, tokens.shape[2]))
            vectors = own if vectors is None else torch.where((input_ids == token)[..., None], own, vectors)
        assert vectors is not None
        with _placed(self.language_model.get_input_embeddings(), here, vectors):
            return self.language_model(input_ids=input_ids, **kwargs)

    def _placeholders(self) -> list[int]:
        return list(self.placeholders.values())


@contextmanager
def _placed(embedding: nn.Module, here: torch.Tensor, vectors: torch.Tensor) -> Iterator[None]:
    """Within, the embedding gives `vectors` (B, L, E) where `here` (B, L). So text is embedded within the language
    model's own forward, as a unit that holds both must have it."""

    def hide(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].masked_fill(here, 0), *args[1:])  # placeholders may lie outside the table

    def put(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where(here[..., None], vectors.to(out.dtype), out)

    handles = [embedding.register_forward_pre_hook(hide), embedding.register_forward_hook(put)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _projector(part: ModalEncoder, width: int) -> nn.Module:
    if isinstance(part.projector, nn.Module):
        return part.projector
    try:
        kind = ProjectorKind(part.projector)
    except ValueError:
        raise ValueError(
            f"projector: {part.projector!r} is not one of {', '.join(ProjectorKind)}, nor a module"
        ) from None
    return build_projector(kind, part.encoder.dim, width, **part.resampler)  # type: ignore[arg-type]


def _tokens(language_model: Any) -> TokenIds:
    """As the language model itself ends and pads."""
    config = language_model.generation_config
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end = -1 if ends[0] is None else ends[0]
    pad = max(end, 0) if config.pad_token_id is None else config.pad_token_id
    vocabulary = language_model.config.get_text_config().vocab_size
    return TokenIds(image=-1, end_of_chunk=end, pad=pad, known=vocabulary, new=0)
