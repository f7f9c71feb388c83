"""A vision-language model: tokens of a picture, then words, through a language model of transformers."""

from __future__ import annotations

import itertools
import zlib
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

WORDS = ["<pad>", "<begin>", "<end>", "a", "red", "blue", "circle", "square"]
PAD, BEGIN, END = 0, 1, 2
LANGUAGE = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
}
SIDE = 4
"""Pixels of a side of a picture; each row of them is a token."""


class SmallVLM(nn.Module):
    """Pictures (B, 4, 12) and words (B, L) -> the output of the language model."""

    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(3 * SIDE, 16), nn.GELU(), nn.Linear(16, 16))
        self.projector = nn.Linear(16, 16)
        self.language = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LANGUAGE))

    def embed(self, pixels: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        """Return the language model's inputs, pictures first."""
        pictures = self.projector(self.vision(pixels))
        words = self.language.get_input_embeddings()(input_ids)
        mask = torch.cat([attention_mask.new_ones(pictures.shape[:2]), attention_mask], dim=1)
        return {"inputs_embeds": torch.cat([pictures, words], dim=1), "attention_mask": mask}

    def forward(self, pixels, input_ids, attention_mask, labels):
        inputs = self.embed(pixels, input_ids, attention_mask)
        before = labels.new_full(pixels.shape[:2], -100)
        return self.language(**inputs, labels=torch.cat([before, labels], dim=1))

    @torch.no_grad()
    def generate(self, pixels, input_ids, attention_mask, **options):
        return self.language.generate(**self.embed(pixels, input_ids, attention_mask), **options)


def text_of(row: Any) -> str:
    """Return the text of a Sample, or of a row of my_pictures."""
    return row["text"] if isinstance(row, dict) else row.text


def picture_of(row: Any) -> Any:
    """Return the picture of a Sample, or of a row of my_pictures."""
    return row["image"] if isinstance(row, dict) else row.images[0]


class WordsProcessor:
    """Samples, or rows of my_pictures, to pixels, words and labels."""

    image_size = SIDE

    def __call__(self, rows: list, max_length: int) -> dict[str, torch.Tensor]:
        ids = [self._ids(text_of(row))[:max_length] for row in rows]
        length = max(map(len, ids))
        padded = torch.tensor([row + [PAD] * (length - len(row)) for row in ids])
        labels = padded.masked_fill(padded == PAD, -100)
        labels[:, 0] = -100
        return {**self._pictures(rows), "input_ids": padded, "attention_mask": (padded != PAD).long(), "labels": labels}

    def prompts(self, rows: list) -> dict[str, torch.Tensor]:
        """Return what comes before the text: the pictures, and where it begins."""
        begin = torch.full((len(rows), 1), BEGIN)
        return {**self._pictures(rows), "input_ids": begin, "attention_mask": torch.ones_like(begin)}

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Return the words up to the end."""
        texts = []
        for row in ids.tolist():
            row = row[: row.index(END)] if END in row else row
            texts.append(" ".join(WORDS[i] for i in row))
        return texts

    def _ids(self, text: str) -> list[int]:
        return [BEGIN, *map(WORDS.index, text.split()), END]

    def _pictures(self, rows: list) -> dict[str, torch.Tensor]:
        pictures = [np.asarray(picture_of(row).resize((SIDE, SIDE)), dtype=np.float32) / 255 for row in rows]
        return {"pixels": torch.tensor(np.stack(pictures)).flatten(2)}


def build():
    """Return the model, whose vision encoder is frozen, and its processor."""
    model = SmallVLM()
    model.vision.requires_grad_(False)
    return model, WordsProcessor()


CALLS = itertools.count()
"""Of `score` with `peak_of`, in this process."""


def score(predictions: list[str], samples: list, scale: float = 1.0, peak_of: int = 0) -> dict[str, float]:
    """Return the share of right texts, and figures that show whether two lists of texts are the same.

    peak_of: number of calls in a run, of which the third has the highest `peak`.
    """
    right = sum(text == text_of(sample) for text, sample in zip(predictions, samples, strict=True))
    lengths = [len(text.split()) for text in predictions]
    peak = {"peak": -abs(next(CALLS) % peak_of - 2)} if peak_of else {}
    return peak | {
        "exact": scale * right / len(samples),
        "shortest": min(lengths),
        "longest": max(lengths),
        "texts": float(zlib.crc32("\n".join(predictions).encode())),
    }


def failing(predictions: list[str], samples: list) -> dict[str, float]:
    """Fail."""
    return {"ratio": len(samples) / (len(predictions) - len(samples))}
