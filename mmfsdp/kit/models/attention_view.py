"""Attention of a model over the patches of its pictures, computed again from the inputs of its layers.

Nothing is stored on a layer: hooks that live as long as one forward hand the inputs out, and the weights of attention,
which the fused kernels do not give, are computed from them again.

B batch, L tokens, T pictures of a sample, P patches of a picture, N latents of a picture, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import torch
from torch import nn

from .cross_attention import MaskedCrossAttention
from .flamingo import Flamingo
from .media_model import MediaModel
from .multimodal import MultimodalModel
from .perceiver import PerceiverAttention


@singledispatch
def looking_layers(model: nn.Module) -> list[int]:
    """Return the decoder layers for which `picture_attention` works: none of a model whose class has no rule here.

    Of a Flamingo those with gated cross-attention; all of a model whose projector keeps the patches; else none.
    """
    return []


@looking_layers.register
def _of_flamingo(model: Flamingo) -> list[int]:
    return [i for i, layer in enumerate(model.layers) if layer.cross_attention is not None]


@looking_layers.register
def _of_multimodal(model: MultimodalModel) -> list[int]:
    if "vision" not in model.encoders:
        return []
    encoder: Any = model.encoders["vision"]
    keeps_patches = model.num_tokens["vision"] == encoder.num_tokens
    return list(range(model.language_model.config.get_text_config().num_hidden_layers)) if keeps_patches else []


@torch.no_grad()
def picture_attention(
    model: MediaModel, input_ids: torch.Tensor, *, media: Mapping[str, torch.Tensor], layer: int
) -> torch.Tensor:
    """Return the attention of each token's query in a decoder layer to each patch, mean over heads: (B, L, T, P).

    What a token makes of it shows in the token after it. A Flamingo's text sees latents, so its attention to them is
    multiplied with theirs to the patches, in the perceiver's last layer, each scaled to sum to 1 (one step of attention
    rollout: Abnar and Zuidema, 2020). Of other models it is the self-attention of the language model at the picture's
    tokens. Raises ValueError for a layer that is not among `looking_layers`.
    """
    if layer not in looking_layers(model):
        raise ValueError(
            f"layer: {layer} does not look at patches; those that do are {looking_layers(model) or 'none'}"
        )
    return attention_in(model, input_ids, media, layer)


@singledispatch
def attention_in(
    model: MediaModel, input_ids: torch.Tensor, media: Mapping[str, torch.Tensor], layer: int
) -> torch.Tensor:
    """Return the attention of a layer that looks at patches, as `picture_attention`."""
    raise NotImplementedError(f"attention_in has no rule for {type(model).__name__}")


@attention_in.register
def _flamingo(model: Flamingo, input_ids: torch.Tensor, media: Mapping[str, torch.Tensor], layer: int) -> torch.Tensor:
    cross: MaskedCrossAttention = model.layers[layer].cross_attention.attn  # type: ignore[union-attr, assignment]
    perceiver: PerceiverAttention = next(model.perceiver.layers[-1].children())  # type: ignore[assignment, union-attr]
    with _inputs_of(cross, perceiver) as seen:
        model(input_ids, media=media)
    text, tokens, (bias, attends_any) = seen[cross]
    key = cross.to_kv(tokens).chunk(2, dim=-1)[0]
    to_latents = attention_weights(cross.to_q(cross.norm(text)), key, heads=cross.heads, mask=bias == 0)
    to_latents = (to_latents * attends_any[:, None]).mean(1)  # (B, L, T*N)
    patches, latents = seen[perceiver]
    latents = perceiver.norm_latents(latents)
    key = perceiver.to_kv(torch.cat((perceiver.norm_media(patches), latents), dim=1)).chunk(2, dim=-1)[0]
    to_patches = attention_weights(perceiver.to_q(latents), key, heads=perceiver.heads).mean(1)  # (B*T, N, P+N)
    to_patches = to_patches[..., : patches.shape[1]]
    to_patches = to_patches / to_patches.sum(-1, keepdim=True)
    pictures = len(to_patches) // len(input_ids)
    return torch.einsum(
        "bltn,btnp->bltp", to_latents.unflatten(-1, (pictures, -1)), to_patches.unflatten(0, (-1, pictures))
    )


@attention_in.register
def _among_text(
    model: MultimodalModel, input_ids: torch.Tensor, media: Mapping[str, torch.Tensor], layer: int
) -> torch.Tensor:
    language, found = model.language_model, []
    before = language.config._attn_implementation
    hooks = [
        language.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "output_attentions": True}), with_kwargs=True
        ),
        language.register_forward_hook(lambda _, __, out: found.append(out.attentions[layer])),
    ]
    try:
        language.set_attn_implementation("eager")  # fused kernels keep their weights to themselves
        model(input_ids, media=media)
    finally:
        language.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    here = input_ids == model.placeholders["vision"]
    each = model.num_tokens["vision"]
    pictures = int(here.sum(1).max()) // each
    weights = found[0].mean(1)  # (B, L, L)
    rows = [w[:, h].unflatten(-1, (-1, each)) for w, h in zip(weights, here, strict=True)]
    return torch.stack([nn.functional.pad(r, (0, 0, 0, pictures - r.shape[1])) for r in rows])


@contextmanager
def _inputs_of(*modules: nn.Module) -> Iterator[dict[nn.Module, tuple[Any, ...]]]:
    """Give the positional arguments that each module is last called with inside the block."""
    seen: dict[nn.Module, tuple[Any, ...]] = {}
    hooks = [m.register_forward_pre_hook(lambda module, args: seen.update({module: args})) for m in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, *, heads: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights by which `mmfsdp.kit.models.perceiver.attend` sums values; each row sums to 1.

    query (B, L, H*d), key (B, M, H*d), mask (B, 1, L, M) true where attended -> (B, H, L, M).
    """
    query = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    key = key.unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)
