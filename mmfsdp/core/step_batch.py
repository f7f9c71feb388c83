"""Define the micro-batches that `train_step` takes, and where there is a loss in them.

Data workers import this file, so it imports neither FSDP nor what asks other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..params import ParamError

IGNORED_LABEL = -100
"""Label of a position without loss, as in torch's cross-entropy and in transformers."""
LOSS_POSITIONS = "loss_positions"
"""Name of the argument of a forward that says where there is a loss; see `loss_positions`."""
MIN_PIECE = 128
"""Positions of a piece, however many tokens there are."""
ONE_ROW_A_SAMPLE = ("input_ids", "labels", "inputs_embeds", "decoder_input_ids")
"""Keys of tensors with a row for each sample. Pictures of several samples may lie in one tensor, patch by patch."""


class StepBatch(Protocol):
    """The methods that a step needs of a micro-batch of B samples.

    Leave it on the CPU: counting its label tokens then waits for no device.
    """

    @property
    def source(self) -> str:
        """Name of the data source; batches of one source share one mean loss."""

    @property
    def weight(self) -> float:
        """Factor of the source's mean loss in the loss of the step."""

    @property
    def size(self) -> int:
        """Samples, B."""

    @property
    def label_tokens(self) -> int:
        """Tokens that the loss of a causal language model is a mean over; see `label_tokens`."""

    def to(self, device: torch.device, /) -> StepBatch:
        """Return the batch on a device."""

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward.

        The forward returns a loss; see `loss_of`. Its output must be a tensor, a dict, a tuple or a dataclass: FSDP1
        looks for tensors in no other objects, and would leave the root unit unsharded after backward.
        """


class MappingBatch:
    """A mapping of a forward's keyword arguments, such as a collator returns, as a batch: one source, of weight 1."""

    source, weight = "data", 1.0

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.mapping = mapping

    @property
    def size(self) -> int:
        """Rows. Raises ParamError if there is no tensor that has some."""
        known = [self.mapping[key] for key in ONE_ROW_A_SAMPLE if key in self.mapping]
        for value in (*known, *self.mapping.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                return len(value)
        keys = ", ".join(self.mapping) or "nothing"
        raise ParamError("micro_batches", f"holds a mapping of {keys}, without a tensor that has a row for each sample")

    @property
    def label_tokens(self) -> int:
        """Labels that a causal model predicts; with one label a sample, those; samples, if labels are no classes."""
        labels = self.mapping.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return self.size
        if labels.dim() == 2:
            labels = labels[:, 1:]  # the first token of a sequence is not predicted
        return int((labels != IGNORED_LABEL).sum())

    def to(self, device: torch.device, /) -> MappingBatch:
        """Return the batch with its tensors on a device, those in lists and dicts as well."""

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if device.type == "cuda" and value.device.type == "cpu" and not value.is_pinned():
                value = value.pin_memory()  # else the host would wait for the copy
            return value.to(device, non_blocking=True)

        return MappingBatch(tree_map(move, dict(self.mapping)))

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments."""
        return dict(self.mapping)


def loss_positions(labels: Tensor) -> Tensor:
    """Return the positions, (R,) of B * L, that predict a label of labels (B, L) which counts.

    A data worker computes them, so that no step waits for a GPU to read labels. Most of a row of a vision-language
    model is prompt and picture, for which the head then computes nothing. They are filled up to a multiple of MIN_PIECE
    with the last position, which predicts nothing.
    """
    last = labels.numel() - 1
    counts = labels != IGNORED_LABEL
    counts[:, 0] = False  # nothing predicts the first token of a row
    positions = counts.flatten().nonzero()[:, 0] - 1
    size = min(-(-len(positions) // MIN_PIECE) * MIN_PIECE, labels.numel())
    return torch.cat([positions, positions.new_full((size - len(positions),), last)])
