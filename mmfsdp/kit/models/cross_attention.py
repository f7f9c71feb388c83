"""Gated cross-attention and its place in a decoder (Flamingo; parameter names and arithmetic of OpenFlamingo).

B batch, L text tokens, M media tokens (pictures x latents), D width of the text, V width of the media,
H heads of width d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from .perceiver import attend, feed_forward


def media_mask(media_time: torch.Tensor, *, pictures: int, latents: int, attend_all: bool) -> torch.Tensor:
    """Return which media each text token attends to: (B, 1, L, pictures*latents), true where it does.

    media_time (B, L) counts the image tokens up to each token: 0 attends to no picture, n to the n-th only, or with
    `attend_all` to the first n.
    """
    slots = torch.arange(1, pictures + 1, device=media_time.device).repeat_interleave(latents)  # (M,)
    time = media_time[:, None, :, None]  # (B, 1, L, 1)
    return time >= slots if attend_all else time == slots


class MediaBias(NamedTuple):
    """A mask as attention needs it. It is the same in all layers, so a model makes it once in a forward."""

    bias: torch.Tensor
    """(B, 1, L, M): 0 where a token attends, minus infinity elsewhere; all 0 for a token that may attend to none, since
    a softmax over nothing is NaN."""
    attends_any: torch.Tensor
    """(B, L, 1): 1 for a token that attends to some media, 0 for others: the factor of what attention returns."""


def media_bias(mask: torch.Tensor, dtype: torch.dtype) -> MediaBias:
    """Return what attention adds to its scores, and multiplies its output with. mask: (B, 1, L, M), of booleans."""
    attends_any = mask.any(-1, keepdim=True)  # (B, 1, L, 1)
    hidden = ~mask & attends_any
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(hidden, float("-inf"))
    return MediaBias(bias, attends_any[:, 0].to(dtype))


class MaskedCrossAttention(nn.Module):
    """Attention of text over media through a mask; a token that may attend to none gets 0."""

    def __init__(self, dim: int, *, media_dim: int, heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(media_dim, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, text: torch.Tensor, media: torch.Tensor, mask: torch.Tensor | MediaBias) -> torch.Tensor:
        """text (B, L, D), media (B, M, V), mask (B, 1, L, M), or what `media_bias` makes of it -> (B, L, D)."""
        query, key_value = self.to_q(self.norm(text)), self.to_kv(media)  # (B, L, H*d), (B, M, 2*H*d)
        bias, attends_any = media_bias(mask, query.dtype) if isinstance(mask, torch.Tensor) else mask
        out = attend(query, key_value, heads=self.heads, mask=bias.to(query.dtype))  # (B, L, H*d)
        return self.to_out(out * attends_any.to(out.dtype))


class GatedCrossAttention(nn.Module):
    """Cross-attention and feed-forward, each added through a tanh gate that starts at 0: at first, a no-op."""

    def __init__(self, dim: int, *, media_dim: int, heads: int = 8, head_dim: int = 64):
        super().__init__()
        self.attn = MaskedCrossAttention(dim, media_dim=media_dim, heads=heads, head_dim=head_dim)
        self.attn_gate = nn.Parameter(torch.zeros(1))
        self.ff = feed_forward(dim)
        self.ff_gate = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Close the gates: tanh(0) = 0."""
        self.attn_gate.zero_()
        self.ff_gate.zero_()

    def forward(
        self, text: torch.Tensor, media: torch.Tensor | None, mask: torch.Tensor | MediaBias | None
    ) -> torch.Tensor:
        """text (B, L, D), media (B, M, V), mask (B, 1, L, M) -> (B, L, D). Without media only the feed-forward acts."""
        x = text.to(self.attn_gate.dtype)  # the frozen decoder may be kept in another format
        if media is not None and mask is not None:
            x = x + self.attn(x, media.to(x.dtype), mask) * self.attn_gate.tanh()
        x = x + self.ff(x) * self.ff_gate.tanh()
        return x.to(text.dtype)


class FlamingoLayer(nn.Module):
    """Take a decoder layer's place: gated cross-attention (or none), then the decoder's own layer."""

    def __init__(self, decoder_layer: nn.Module, cross_attention: GatedCrossAttention | None):
        super().__init__()
        self.cross_attention = cross_attention
        self.decoder_layer = decoder_layer

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take the decoder layer's arguments, plus `media` and `media_mask`, None where there are no pictures."""
        media, mask = kwargs.pop("media"), kwargs.pop("media_mask")
        if self.cross_attention is not None:
            hidden_states = self.cross_attention(hidden_states, media, mask)
        return self.decoder_layer(hidden_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # decoders read attributes of their layers, such as attention_type
            return getattr(super().__getattr__("decoder_layer"), name)
