"""The perceiver resampler (Flamingo, Alayrac et al. 2022; parameter names and arithmetic of OpenFlamingo).

B batch, T pictures of a sample, F frames of a picture, P patch tokens of a frame, N latents, D width, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def attend(
    query: torch.Tensor, key_value: torch.Tensor, *, heads: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return multi-head attention of L queries over M keys, as cross-attention computes it, too.

    query (B, L, H*d), key_value (B, M, 2*H*d), mask (B, 1, L, M) true where attended, or what is added to the scores
    -> (B, L, H*d).
    """
    key, value = key_value.chunk(2, dim=-1)
    query = query.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, L, d)
    key = key.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, M, d)
    value = value.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # (B, H, L, d)
    return out.transpose(1, 2).flatten(2)


def feed_forward(dim: int) -> nn.Sequential:
    """Return LayerNorm, then two matrices without bias around a GELU. (..., dim) -> (..., dim)."""
    return nn.Sequential(
        nn.LayerNorm(dim),
        nn.Linear(dim, 4 * dim, bias=False),
        nn.GELU(),
        nn.Linear(4 * dim, dim, bias=False),
    )


class PerceiverAttention(nn.Module):
    """Attention of the latents over the picture and over each other."""

    def __init__(self, dim: int, *, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.norm_media = nn.LayerNorm(dim)
        self.norm_latents = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, media: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """media (B, F*P, D), latents (B, N, D) -> (B, N, D)."""
        latents = self.norm_latents(latents)
        keys = torch.cat((self.norm_media(media), latents), dim=1)  # (B, F*P + N, D)
        return self.to_out(attend(self.to_q(latents), self.to_kv(keys), heads=self.heads))


class PerceiverResampler(nn.Module):
    """Turn any number of patch tokens into `num_latents` vectors per picture."""

    def __init__(self, dim: int, *, num_latents: int = 64, depth: int = 6, heads: int = 8, head_dim: int = 64):
        super().__init__()
        self.latents = nn.Parameter(torch.empty(num_latents, dim))
        self.reset_parameters()
        self.layers = nn.ModuleList(
            nn.ModuleList([PerceiverAttention(dim, heads=heads, head_dim=head_dim), feed_forward(dim)])
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the latents, which belong to no layer."""
        self.latents.normal_()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, T, F, P, D) -> (B, T, N, D)."""
        batch, pictures = features.shape[:2]
        features = features.to(self.latents.dtype).flatten(2, 3)  # (B, T, F*P, D)
        features = features.flatten(0, 1)  # (B*T, F*P, D)
        latents = self.latents.expand(len(features), -1, -1)  # (B*T, N, D)
        for layer in self.layers:
            attention, mlp = layer.children()
            latents = latents + attention(features, latents)
            latents = latents + mlp(latents)
        # Not the norm first: its output would be a view, and FSDP2 warns of those.
        return self.norm(latents.unflatten(0, (batch, pictures)))  # (B, T, N, D)
