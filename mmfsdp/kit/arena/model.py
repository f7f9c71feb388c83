"""The model that every file of the arena shards: a frozen encoder, a projector, a frozen language model with adapters.

It has what real models have and toys lack: inputs by keyword, layers with two outputs, a head that is tied to the
embedding, and sizes that no number of ranks divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, INNER, RANK = 301, 128, 511, 4
BLOCKS, LAYERS = 3, 4
SAMPLES, TOKENS, PATCHES = 2, 12, 5
Shard = Callable[..., Any]
"""`shard(*modules, reshard=True, frozen="SHARD")` of lessons 02 and 03."""


class Block(nn.Module):
    """A layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, patches, WIDTH) -> the same shape."""
        return x + self.down(torch.tanh(self.up(x)))


class Adapter(nn.Module):
    """A low-rank matrix that trains beside frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, tokens, WIDTH) -> the same shape."""
        return self.up(self.down(x))


class Layer(nn.Module):
    """A layer of the language model. Its `adapter` trains, all else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.adapter = Adapter()

    def forward(self, x: torch.Tensor, *, media: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(samples, tokens, WIDTH) and (samples, 1, WIDTH) -> the tokens, and their mean (samples, WIDTH)."""
        y = x + media + self.down(torch.tanh(self.up(x))) + self.adapter(x)
        return y, y.mean(1)


class ArenaModel(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)
        for part in (self.projector, *(layer.adapter for layer in self.layers)):
            part.requires_grad_(True)

    def forward(self, ids: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        """(samples, tokens) and (samples, patches, WIDTH) -> the loss."""
        x = pictures
        for block in self.encoder:
            x = block(x)
        media = self.projector(x.mean(1)).unsqueeze(1)
        x = self.embedding(ids)
        summary = x.new_zeros(())
        for layer in self.layers:
            x, mean = layer(x, media=media)
            summary = summary + mean.square().mean()
        # A Linear returns a view for inputs of three dims, and fully_shard warns of a unit that returns a view.
        logits = self.head(x[:, :-1].flatten(0, 1))
        return cross_entropy(logits, ids[:, 1:].flatten()) + 0.01 * summary


def build() -> ArenaModel:
    """Return the model, with the same weights on each call and rank."""
    torch.manual_seed(0)
    return ArenaModel()


def batch(seed: int, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's micro-batch of a step. Another seed gives other texts and pictures."""
    drawn = torch.Generator().manual_seed(seed * 10_007 + step * 101 + rank)
    ids = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=drawn)
    return {"ids": ids, "pictures": torch.randn(SAMPLES, PATCHES, WIDTH, generator=drawn)}


def wrap(model: ArenaModel, shard: Shard) -> list[Any]:
    """Shard each block, the projector, each adapter, each layer and the rest; return what `shard` returned.

    A file that has a function `wrap(model, budget)` of its own does as that says.
    """
    units = [shard(block) for block in model.encoder]
    units.append(shard(model.projector))
    for layer in model.layers:
        units += [shard(layer.adapter), shard(layer)]
    units.append(shard(model))
    return units
