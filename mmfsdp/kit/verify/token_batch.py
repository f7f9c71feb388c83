"""The tokens of a batch, for checks that change some of them and look at the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.step_batch import IGNORED_LABEL, LOSS_POSITIONS, MappingBatch, loss_positions
from ..data.own_random import own_random

MIN_RUN = 3
"""Equal tokens at the end of a row that are taken for padding, where nothing else says what is."""
PICTURE_TOKENS = ("image_token_id", "image_token_index", "video_token_id")
"""Keys of transformers' configurations: the token that stands for a picture."""


def micro_batches_of(batch: Any) -> list[Any]:
    """Return the micro-batches of a batch of one's own: its items, if it is a list of dicts, else the batch."""
    is_list = isinstance(batch, (list, tuple)) and bool(batch)
    if is_list and all(isinstance(each, Mapping) for each in batch):
        return list(batch)
    return [batch]


def inputs_of(batch: Any) -> dict[str, Any] | None:
    """Return the keyword arguments of the forward, of the first micro-batch; None if nobody knows them."""
    first = micro_batches_of(batch)[0]
    if isinstance(first, Mapping):
        return dict(first)
    return dict(first.inputs()) if hasattr(first, "inputs") else None


def with_inputs(batch: Any, inputs: dict[str, Any]) -> Any:
    """Return a batch of the kind of `batch` with other keyword arguments."""
    if isinstance(batch, Mapping):
        return inputs
    return MappingBatch(inputs) if hasattr(batch, "inputs") else [inputs]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode, and give each module its own mode back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class TokenBatch:
    """A batch with `labels` (B, L), and `input_ids` of the same shape where it has them."""

    def __init__(self, batch: Any, model: nn.Module) -> None:
        self.batch, self.model = batch, model
        self.inputs = inputs_of(batch) or {}
        labels, ids = self.inputs.get("labels"), self.inputs.get("input_ids")
        is_tokens = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
        self.labels: Tensor | None = labels if is_tokens else None
        same_shape = self.labels is not None and isinstance(ids, Tensor) and ids.shape == self.labels.shape
        self.ids: Tensor | None = ids if same_shape else None

    @property
    def shape(self) -> torch.Size:
        """Return (B, L)."""
        assert self.ids is not None
        return self.ids.shape

    def loss(self, trial_loss: Any, **changes: Tensor) -> float:
        """Return the loss in eval mode, with other tensors in the place of some."""
        inputs = self.inputs | changes
        if LOSS_POSITIONS in inputs and "labels" in changes:
            inputs[LOSS_POSITIONS] = loss_positions(inputs["labels"])
        with torch.no_grad(), own_random(0), eval_mode(self.model):
            return float(trial_loss(self.model, with_inputs(self.batch, inputs)))

    def only(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """Return the labels (B, L) with all masked but those at some (row, column)."""
        assert self.labels is not None
        labels = torch.full_like(self.labels, IGNORED_LABEL)
        for row, column in places:
            labels[row, column] = self.labels[row, column]
        return labels

    def counted(self, row: int) -> list[int]:
        """Return the columns of a row whose labels count, without the first, which a causal model does not predict."""
        assert self.labels is not None
        columns = (self.labels[row] != IGNORED_LABEL).nonzero()[:, 0].tolist()
        return [column for column in columns if column > 0]

    def shift(self) -> int | None:
        """Return by how much labels are shifted: label t is token t + shift. None if they are not the tokens."""
        if self.ids is None or self.labels is None:
            return None
        length = self.labels.shape[1]
        for shift in (0, 1, -1, 2):
            low, high = max(0, -shift), length - max(0, shift)
            labels = self.labels[:, low:high]
            tokens = self.ids[:, low + shift : high + shift]
            counts = labels != IGNORED_LABEL
            if counts.any() and bool((labels[counts] == tokens[counts]).float().mean() > 0.9):
                return shift
        return None

    def padding(self) -> Tensor | None:
        """Return where the padding is, (B, L) bool: by the attention mask, else equal tokens at the end of a row."""
        if self.ids is None:
            return None
        mask = self.inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == self.ids.shape:
            return mask == 0
        padding = torch.zeros_like(self.ids, dtype=torch.bool)
        runs = []
        for row in self.ids.tolist():
            run = 1
            while run < len(row) and row[-run - 1] == row[-1]:
                run += 1
            runs.append((row[-1], run))
        config = getattr(self.model, "config", None)
        known = getattr(config, "pad_token_id", None)
        for index, (token, run) in enumerate(runs):
            lengths = {other for same, other in runs if same == token}
            # The first of them may be the end of the text.
            if run > 1 and (token == known or (run >= MIN_RUN and len(lengths) > 1)):
                padding[index, -run + 1 :] = True
        return padding

    def picture_tokens(self) -> set[int]:
        """Return the tokens that stand for pictures, as the model knows them."""
        config = getattr(self.model, "config", None)
        values = [getattr(config, key, None) for key in PICTURE_TOKENS]
        placeholders = getattr(self.model, "placeholders", None)
        if isinstance(placeholders, Mapping):
            values += placeholders.values()
        return {value for value in values if isinstance(value, int)}

    def other_token(self, token: int) -> int:
        """Return a token of the text that is another one."""
        assert self.labels is not None
        for value in self.labels[self.labels != IGNORED_LABEL].unique().tolist():
            if value != token:
                return int(value)
        return token
