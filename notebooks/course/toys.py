"""Two small models for the lessons in which FSDP is written: a language model that trains, and one that sees, mostly
frozen. Their sizes are odd, so that shards need padding. They call their layers with keywords, as transformers does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, INNER = 301, 96, 255


class Block(nn.Module):
    """What stands for a decoder layer: two matrices around a nonlinearity, and a residual connection."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor, residual: bool = True) -> torch.Tensor:
        """(batch, tokens, WIDTH) -> (batch, tokens, WIDTH)."""
        y = self.down(torch.tanh(self.up(x)))
        return x + y if residual else y


class Look(nn.Module):
    """What stands for gated cross-attention: all tokens get the same summary of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(1))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, WIDTH) and (batch, 1, WIDTH) -> (batch, tokens, WIDTH)."""
        return x + torch.tanh(self.gate) * self.mix(media)


class ToyLM(nn.Module):
    """A language model of four blocks. Its head is tied to the embedding."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) -> the loss."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x=x, residual=True)
        return next_token_loss(self.head, x, ids)


class ToyVLM(nn.Module):
    """A frozen encoder and a frozen language model, with a projector and four cross-attentions that train."""

    def __init__(self, inner: Sequence[int] = (INNER,) * 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*[Block() for _ in range(3)])
        self.projector = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.looks = nn.ModuleList(Look() for _ in inner)
        self.blocks = nn.ModuleList(Block(size) for size in inner)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        for part in (self.encoder, self.embedding, self.blocks):
            part.requires_grad_(False)

    def forward(self, ids: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) and (batch, patches, WIDTH) -> the loss."""
        media = self.projector(self.encoder(pictures).mean(1)).unsqueeze(1)
        x = self.embedding(ids)
        for look, block in zip(self.looks, self.blocks, strict=True):
            x = block(x=look(x=x, media=media), residual=True)
        return next_token_loss(self.head, x, ids)


def next_token_loss(head: nn.Linear, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each token after the first. x: (batch, tokens, WIDTH)."""
    # A Linear returns a view for inputs of three dims, and fully_shard warns of a unit that returns a view.
    logits = head(x[:, :-1].flatten(0, 1))
    return cross_entropy(logits.float(), ids[:, 1:].flatten())


def toy_lm() -> ToyLM:
    """Return the language model, with the same weights on each call and rank."""
    torch.manual_seed(0)
    return ToyLM()


def toy_vlm() -> ToyVLM:
    """Return the model that sees, with the same weights on each call and rank."""
    torch.manual_seed(0)
    return ToyVLM()


def uneven_vlm() -> ToyVLM:
    """Return the model that sees, with blocks of 0.2, 16.2, 0.2 and 15.7 MiB in fp32."""
    torch.manual_seed(0)
    return ToyVLM((INNER, 22_000, INNER, 21_300))


def texts(rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's batch for the language model."""
    return {"ids": torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(rank))}


def pictures_and_texts(rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's batch for the model that sees."""
    patches = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(rank))
    return texts(rank) | {"pictures": patches}
