"""A small vision-language model of one's own, right, or with one of the usual mistakes planted in it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

WORDS = ["<pad>", "<begin>", "<end>"]
LANGUAGE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SIDE = 4


class Vision(nn.Module):
    """Pictures (B, 4, 12) -> features (B, 4, 16), less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3 * SIDE, 16), nn.GELU(), nn.Linear(16, 16))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layer(pixels - self.mean)


class Model(nn.Module):
    """Pictures (B, 4, 12) and words (B, L) -> the output of the language model."""

    mistake = ""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Vision()
        self.projector = nn.Linear(16, 16)
        self.side = nn.Linear(16, 16)
        self.language = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LANGUAGE))

    def forward(self, input_ids, labels, pixels=None):
        x = self.language.get_input_embeddings()(input_ids)
        side = self.side(x)
        x = x + (side.detach() if self.mistake == "detached branch" else side)
        if pixels is None and self.mistake != "skips the encoder":
            pixels, seen = x.new_zeros(len(x), SIDE, 3 * SIDE), 0.0
        else:
            seen = 1.0
        if pixels is not None:
            x = torch.cat([seen * self.projector(self.encode(pixels)), x], dim=1)
            labels = torch.cat([labels.new_full((len(x), SIDE), -100), labels], dim=1)
        output = self.language(inputs_embeds=x, labels=labels)
        if self.mistake == "sum":
            output.loss = output.loss * (labels[:, 1:] != -100).sum()
        return {"loss": output.loss}

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.mistake == "buffer on rank 0" and os.environ.get("RANK", "0") == "0":
            self.vision.mean.fill_(0.5)  # found in the first batch, by one rank
        if self.mistake == "encoder under no_grad":
            with torch.no_grad():
                return self.vision(pixels)
        features = self.vision(pixels)
        if self.mistake == "detached in part":
            return torch.cat([features[..., :8].detach(), features[..., 8:]], dim=-1)
        return features


class Processor:
    """Samples to pixels, if they have a picture, tokens and labels."""

    image_size = SIDE

    def __call__(self, rows: list) -> dict[str, Any]:
        ids = [[1, *(3 + hash_of(word) % 60 for word in row.text.split()), 2] for row in rows]
        length = max(map(len, ids))
        padded = torch.tensor([row + [0] * (length - len(row)) for row in ids])
        labels = padded.masked_fill(padded == 0, -100)
        batch = {"input_ids": padded, "labels": labels}
        if all(row.images for row in rows):
            pictures = [np.asarray(row.images[0].resize((SIDE, SIDE)), dtype=np.float32) / 255 for row in rows]
            batch["pixels"] = torch.tensor(np.stack(pictures)).flatten(2)
        return batch


def hash_of(word: str) -> int:
    return sum(map(ord, word))


def build(mistake: str = ""):
    """Return the model and its processor."""
    model = Model()
    model.mistake = mistake
    if mistake == "untied head":
        head = model.language.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.language.model.layers[0].requires_grad_(False)
    return model, Processor()
