"""Projectors: from an encoder's tokens to vectors of the language model's width.

N items, P tokens of each, D width of the encoder, E width of the language model.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ..params import ProjectorKind
from .perceiver import PerceiverResampler
from .shapes import output_shape


class Resampler(nn.Module):
    """The perceiver resampler, then a matrix: any number of tokens in, `num_latents` out."""

    def __init__(
        self, dim: int, out: int, *, num_latents: int = 64, depth: int = 6, heads: int = 8, head_dim: int = 64
    ):
        super().__init__()
        self.perceiver = PerceiverResampler(dim, num_latents=num_latents, depth=depth, heads=heads, head_dim=head_dim)
        self.linear = nn.Linear(dim, out)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, P, D) -> (N, num_latents, E)."""
        return self.linear(self.perceiver(tokens[:, None, None])[:, 0])


def build_projector(kind: ProjectorKind, dim: int, out: int, **resampler: int) -> nn.Module:
    """(N, P, dim) -> (N, P or num_latents, out)."""
    if kind is ProjectorKind.LINEAR:
        return nn.Linear(dim, out)
    if kind is ProjectorKind.RESAMPLER:
        return Resampler(dim, out, **resampler)
    # LLaVA 1.5's, with the names that transformers gives it.
    parts = {"linear_1": nn.Linear(dim, out), "act": nn.GELU(), "linear_2": nn.Linear(out, out)}
    return nn.Sequential(OrderedDict(parts))


def embedding_width(language_model: Any) -> int:
    """Features of an embedded token, which in OPT may be fewer than the layers'."""
    return language_model.get_input_embeddings().weight.shape[1]


def projected_tokens(key: str, projector: nn.Module, encoder: Any, language_model: Any) -> int:
    """Tokens that a projector makes of one item of an encoder. Raises ValueError naming two parts and their widths
    where they do not fit together."""
    wanted = embedding_width(language_model)
    names = [type(part).__name__ for part in (projector, getattr(encoder, "visual", encoder), language_model)]
    tokens = torch.empty(2, encoder.num_tokens, encoder.dim, device="meta")
    try:
        shape = output_shape(projector, tokens)
    except (RuntimeError, ValueError) as error:
        takes = next((p.shape[-1] for p in projector.parameters() if p.ndim > 1), "another number")
        raise ValueError(
            f"encoders.{key}: the projector {names[0]} takes {takes} features but the encoder {names[1]} gives "
            f"{encoder.dim}; make one fit the other ({error})"
        ) from None
    if len(shape) != 3 or shape[0] != 2:
        raise ValueError(
            f"encoders.{key}: the projector {names[0]} makes {tuple(tokens.shape)} into {tuple(shape)}; "
            "it must give (items, tokens, features)"
        )
    if shape[2] != wanted:
        raise ValueError(
            f"encoders.{key}: the projector {names[0]} gives {shape[2]} features but the language model "
            f"{names[2]} takes {wanted}; make one fit the other"
        )
    return shape[1]
