"""A contrastive model: a tower for pictures, a tower for words, and InfoNCE over the pairs of a batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WORDS = ["red", "blue", "circle", "square"]


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    """Layers around a first and a last matrix."""

    def __init__(self, size: int, width: int, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(size, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.last = nn.Linear(width, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.last(x), dim=-1)


class TwoTowers(nn.Module):
    """Pictures (B, 12) and words (B, 4) -> the loss."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.pictures = Tower(12, width)
        self.words = Tower(len(WORDS), width, dropout)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("offset", torch.zeros(1), persistent=False)

    def forward(self, pixels: torch.Tensor, words: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        similarity = self.scale.exp() * self.pictures(pixels) @ self.words(words["counts"]).T + self.offset
        pairs = torch.arange(len(pixels), device=pixels.device)
        return {"loss": (F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.T, pairs)) / 2}


class PairProcessor:
    """Samples to pixels and counts of words. Noise shows random numbers that a resumed run draws otherwise."""

    image_size = 2

    def __init__(self, noise: float = 0.0):
        self.noise = noise

    def __call__(self, rows: list) -> dict:
        pixels, counts = [], []
        for row in rows:
            picture, text = (row["picture"], row["text"]) if isinstance(row, dict) else (row.images[0], row.text)
            pixels.append(np.asarray(picture.resize((2, 2)), dtype=np.float32).ravel() / 255)
            counts.append([float(word in text.split()) for word in WORDS])
            if "ugly" in text:
                raise ValueError("ugly pictures are not shown")
        pixels = torch.tensor(np.stack(pixels))
        pixels = pixels + self.noise * torch.randn_like(pixels)
        return {"pixels": pixels, "words": {"counts": torch.tensor(counts)}}


def build(width: int = 16, noise: float = 0.0, dropout: float = 0.0):
    """Return the model with its tower of pictures frozen, and its processor."""
    model = TwoTowers(width, dropout)
    model.pictures.requires_grad_(False)
    model.pictures.last.requires_grad_(True)
    return model, PairProcessor(noise)


def build_in(dtype: str):
    """Return the model with its weights in a dtype; the processor's tensors stay in fp32.

    A convolution comes first: without values, torch compares dtypes in few operators, and there it does.
    """
    model, processor = build()
    convolution = nn.Conv1d(1, 1, 1).requires_grad_(False)
    model.pictures.first = nn.Sequential(nn.Unflatten(1, (1, 12)), convolution, nn.Flatten(), model.pictures.first)
    return model.to(getattr(torch, dtype)), processor


def build_by_value(width: int = 16):
    """Return a model that cannot be built on the meta device: it reads a value."""
    model, processor = build(width)
    with torch.no_grad():
        model.scale.fill_(float(torch.ones(1).mul(2).item()))
    return model, processor


class Holding(TwoTowers):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__(16, 0.0)
        self.half = torch.full((1,), 0.5)

    def forward(self, pixels, words):
        return (super().forward(pixels, words)["loss"] * self.half.sum(), None)


def build_holding():
    """Return a model with a plain tensor."""
    return Holding(), PairProcessor()
