"""The two models that benches shard, random weights and the same each time, and batches for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..data import Batch
from ..freeze import freeze
from ..models import Flamingo, ModalEncoder, MultimodalModel, TokenIds, build_language, build_vision
from ..params import BackboneParams, BackboneSource, ModelParams


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches."""

    words: int
    """Known to the language model."""
    length: int
    """Tokens of a sample."""
    picture: int
    """Pixels of a side; a patch has half of it."""
    embed: int
    vision: dict[str, int]
    text: dict[str, int]
    joint: dict[str, int] = field(default_factory=dict)
    """Of a Flamingo's perceiver and cross-attention."""


def sized(width: int, layers: int = 6) -> Sizes:
    """By the width of the language model; 512 makes a Flamingo of about 50 M parameters."""
    return Sizes(
        words=10_000,
        length=16,
        picture=32,
        embed=width,
        vision={"width": width * 3 // 4, "layers": 6, "head_width": width // 8},
        text={
            "hidden_size": width,
            "intermediate_size": width * 8 // 3,
            "num_attention_heads": 8,
            "num_hidden_layers": layers,
        },
        joint={"num_latents": 8, "attention_heads": 7, "attention_head_dim": width // 8},
    )


SMALL = Sizes(
    words=50,
    length=9,
    picture=16,
    embed=16,
    vision={"width": 24, "layers": 2, "head_width": 12},
    text={"hidden_size": 20, "intermediate_size": 44, "num_attention_heads": 2, "num_hidden_layers": 3},
    joint={"num_latents": 3, "attention_heads": 2, "attention_head_dim": 8},
)
"""A step takes milliseconds."""


def build(kind: str, width: int = 512, *, sizes: Sizes | None = None) -> Flamingo | MultimodalModel:
    """A frozen vision encoder and language model, and what trains between them. kind: flamingo, or projector (as
    LLaVA's first stage: only the projector trains)."""
    sizes = sizes or sized(width, layers=8 if kind == "projector" else 6)
    torch.manual_seed(0)
    picture = {"image_size": sizes.picture, "patch_size": sizes.picture // 2, **sizes.vision}
    vision = build_vision(
        BackboneParams(source=BackboneSource.OPEN_CLIP, config={"embed_dim": sizes.embed, "vision_cfg": picture})
    )
    text = {"model_type": "llama", "vocab_size": sizes.words, **sizes.text}
    language = build_language(BackboneParams(config=text))
    if kind == "projector":
        placeholders = {"vision": sizes.words}
        whole = MultimodalModel({"vision": ModalEncoder(vision)}, language, placeholders=placeholders)
        freeze(whole, ("encoders.*", "language_model.*"))
        return whole
    tokens, joint = TokenIds.after(sizes.words), {"cross_attention_every": 2, "perceiver_depth": 2, **sizes.joint}
    model = Flamingo(vision, language, tokens=tokens, **joint)  # type: ignore[arg-type]
    open_gates(model)
    freeze(model, ModelParams(language=BackboneParams(name="any")).freeze)
    return model


def open_gates(model: nn.Module) -> None:
    """Of a Flamingo's cross-attention, half: at 0 nothing behind them would learn."""
    for name, p in model.named_parameters():
        if name.endswith("_gate"):
            p.data.fill_(0.5)


def batch_of(kind: str, *, seed: int, sizes: Sizes | None = None, ragged: bool = False) -> Batch:
    """Two samples of a picture each; with as many label tokens on every rank, or with `ragged` of unlike number."""
    sizes = sizes or sized(512)
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, sizes.words, (2, sizes.length), generator=g)
    picture = 4 if kind == "projector" else 1
    ids[:, :picture] = sizes.words if kind == "projector" else TokenIds.after(sizes.words).image
    labels = ids.clone()
    labels[:, :picture] = -100
    for row in range(2) if ragged else ():
        labels[row, sizes.length - (seed + row) % 5 :] = -100
    media: dict[str, Any] = {"vision": torch.randn(2, 1, 1, 3, sizes.picture, sizes.picture, generator=g)}
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, media=media)
