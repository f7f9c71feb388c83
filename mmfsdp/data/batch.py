"""Sample: one picture-and-text example. Batch: what the model gets, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .corrupt import label_of

IGNORE = -100
"""Label of a position without loss, as in torch's cross-entropy and in transformers."""


QUESTION = "USER: {}\nASSISTANT:\n"
"""The prompt of a question in a conversation, for models without a chat template."""


@dataclass(frozen=True)
class Sample:
    """One example. Placeholders `<image>` in prompt and text are, in order, the pictures in `images`."""

    prompt: str
    """The given part; carries no loss."""

    text: str
    """The part to learn; carries the loss, except at `<image>`."""

    images: tuple[Image.Image, ...] = ()
    """The pictures, in the order of their placeholders."""

    name: str = ""
    """The sample's name in reports and errors. Records of a source may share it: ids repeat in published data."""

    more: tuple[tuple[str, str], ...] = ()
    """Further turns of a conversation, as (prompt, text)."""

    where: str = ""
    """The place of its record in a file, where others may share its name: a row, a line."""

    @property
    def label(self) -> str:
        """Return what tells this sample from all others of its source: skipped records are counted by it."""
        return label_of(self.name, self.where)


@dataclass(frozen=True)
class Batch:
    """Tensors of B samples of up to L tokens.

    `media["vision"]` always has T >= 1: a sample with fewer pictures gets blank ones, so that every rank enters every
    unit, whatever its samples are.
    """

    input_ids: Tensor
    """(B, L) int64."""

    attention_mask: Tensor | None
    """(B, L) int64, 0 at padding. None where none is needed: a mask makes attention slower, and the host wait for a GPU
    to read it."""

    labels: Tensor | None
    """(B, L) int64: token ids (the model shifts them), IGNORE where there is no loss. None in a batch of prompts."""

    media: dict[str, Tensor] = field(default_factory=dict)
    """By modality; vision is (B, T, F, C, H, W) float32: T pictures of F frames."""

    weight: float = 1.0
    """Factor of its source's mean loss in the loss of a step."""

    source: str = ""
    """The source's name in the parameters (data, data.more.0): batches of one source share one mean loss."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Label to reason of the corrupt records that were left out."""

    truncated: int = 0
    """Samples that were cut to max_length."""

    @property
    def size(self) -> int:
        """Return the number of samples, B."""
        return self.input_ids.shape[0]

    @property
    def label_tokens(self) -> int:
        """Return the number of positions with loss. Labels are shifted: the first token of a sequence has none."""
        return 0 if self.labels is None else int((self.labels[:, 1:] != IGNORE).sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. Called by torch's DataLoader."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            attention_mask=None if self.attention_mask is None else function(self.attention_mask),
            labels=None if self.labels is None else function(self.labels),
            media={name: function(tensor) for name, tensor in self.media.items()},
        )

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of `model(**batch.inputs())`, or of `model.generate` if there are no labels."""
        values: dict[str, Any] = {"input_ids": self.input_ids, "media": self.media}
        if self.attention_mask is not None:
            values["attention_mask"] = self.attention_mask
        if self.labels is not None:
            values["labels"] = self.labels
        return values
