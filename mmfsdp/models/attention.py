"""Pieces that the perceiver and the gated cross-attention share. B batch, L queries, M keys, H heads, D width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def attend(
    query: torch.Tensor, key_value: torch.Tensor, *, heads: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Multi-head attention. query (B, L, H*D), key_value (B, M, 2*H*D), mask (B, 1, L, M) true where seen."""
    key, value = key_value.chunk(2, dim=-1)
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, *, heads: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """What `attend` weighs values with: query (B, L, H*D), key (B, M, H*D) -> (B, H, L, M), each row summing to 1."""
    query, key = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)


def feed_forward(dim: int) -> nn.Sequential:
    """LayerNorm, then two matrices without bias around a GELU. (..., dim) -> (..., dim)."""
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, 4 * dim, bias=False),
        nn.GELU(),
        nn.Linear(4 * dim, dim, bias=False),
    )
