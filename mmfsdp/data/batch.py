"""Sample: one picture-and-text example. Batch: what the model gets, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

IGNORE = -100
"""Label of a position without loss, as in torch's cross-entropy and in transformers."""


@dataclass(frozen=True)
class Sample:
    """One example. Placeholders `<image>` in prompt and text are, in order, the pictures in `images`."""

    prompt: str
    """What is given; carries no loss."""

    text: str
    """What is to be said; carries the loss, but for `<image>` within it."""

    images: tuple[Image.Image, ...] = ()
    """The pictures, in the order of their placeholders."""

    name: str = ""
    """What reports and errors call this sample."""

    more: tuple[tuple[str, str], ...] = ()
    """Further turns of a conversation: what is given and what is to be said, as prompt and text."""

    sounds: tuple[Any, ...] = ()
    """Sounds, in the order of `<audio>` placeholders: one-dimensional arrays of 16,000 samples a second, -1 to 1."""


@dataclass(frozen=True)
class Batch:
    """Tensors of B samples of up to L tokens.

    `media["vision"]` is always there with T >= 1: a sample with fewer pictures has blank ones, so that every rank
    enters every unit, whatever its samples are.
    """

    input_ids: Tensor
    """(B, L) int64."""

    attention_mask: Tensor
    """(B, L) int64, 0 at padding."""

    labels: Tensor | None
    """(B, L) int64: token ids (the model shifts them), IGNORE where there is no loss. None in a batch of prompts."""

    media: dict[str, Tensor] = field(default_factory=dict)
    """By modality; vision is (B, T, F, C, H, W) float32: T pictures of F frames."""

    weight: float = 1.0
    """Factor of its source's mean loss in the loss of a step."""

    source: str = ""
    """Where in the parameters its source stands: batches of one source share one mean loss."""

    @property
    def size(self) -> int:
        """Samples, B."""
        return self.input_ids.shape[0]

    @property
    def label_tokens(self) -> int:
        """Positions with loss."""
        return 0 if self.labels is None else int((self.labels != IGNORE).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch where a GPU can fetch it while the host goes on; asked for by torch's DataLoader."""
        return self._each(Tensor.pin_memory)

    def _each(self, act: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=act(self.input_ids),
            attention_mask=act(self.attention_mask),
            labels=None if self.labels is None else act(self.labels),
            media={name: act(tensor) for name, tensor in self.media.items()},
        )

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `model(**batch.inputs())`, or `model.generate` if there are no labels."""
        values = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "media": self.media}
        return values if self.labels is None else {**values, "labels": self.labels}
