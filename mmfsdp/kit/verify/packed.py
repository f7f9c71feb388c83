"""check_packed: each text of a packed row is predicted as it is by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.step_batch import IGNORED_LABEL, LOSS_POSITIONS
from .label_checks import EQUAL, depends_on
from .lines import OK, WRONG, Line
from .token_batch import TokenBatch, with_inputs
from .trial import Trial

Text = tuple[int, int, int]
"""Row, first column, and the column after the last one."""


def check_packed(trial: Trial) -> Line | None:
    """Texts that are packed into one row are predicted as each by itself. Only for batches that say what is a text."""
    tokens = TokenBatch(trial.loop.batches[0], trial.plain)
    texts = [text for text in texts_of(tokens) if labels_in(tokens, text)]
    for before, text in zip(texts, texts[1:], strict=False):
        # Texts of different rows never see each other.
        if text[0] != before[0]:
            continue
        row, start, _ = text
        if start in tokens.counted(row):
            words = "the first token of a packed text counts in the loss: it is predicted from the text before it"
            return Line(WRONG, "packed", words, "set its label to -100")
        labels = tokens.only(labels_in(tokens, text))
        if depends_on(trial, tokens, labels, labels_in(tokens, before)[-1]):
            words = "a text attends to the one that is packed before it"
            fix = "give the attention the lengths of the texts (cu_seq_lens, or a mask of blocks)"
            return Line(WRONG, "packed", words, fix)
    if all(start == 0 for _, start, _ in texts):
        return None
    words = "texts that are packed into one row do not see each other"
    # Of pictures nobody knows to which text of the row they belong.
    others = [key for key, value in tokens.inputs.items() if is_of_no_token(tokens, value)]
    if others:
        return Line(
            OK, "packed", f"{words}; not compared with each text by itself, since nobody knows whose {others[0]} are"
        )
    for text in texts:
        if not is_as_by_itself(trial, tokens, text):
            return _line_of_other(tokens, text)
    return Line(OK, "packed", f"{words}, and each is predicted as by itself")


def _line_of_other(tokens: TokenBatch, text: Text) -> Line:
    """Return the line for a text that is predicted otherwise in its packed row."""
    row, start, _ = text
    words = f"a text that begins in column {start} of a row is predicted otherwise than by itself"
    positions = tokens.inputs.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == tokens.shape and positions[row, start]:
        words += f": its positions begin at {positions[row, start]}"
        return Line(WRONG, "packed", words, "begin the position_ids of each text at 0")
    return Line(WRONG, "packed", words, "have every layer use the position_ids of the batch, which begin again")


def texts_of(tokens: TokenBatch) -> list[Text]:
    """Return the texts of all rows: by the numbers in the attention mask (1 1 2 2 2 0), else by the positions."""
    mask, positions = tokens.inputs.get("attention_mask"), tokens.inputs.get("position_ids")
    if tokens.ids is None:
        return []
    _, length = tokens.shape
    if isinstance(mask, Tensor) and mask.shape == tokens.shape and mask.max() > 1:
        begins = torch.ones_like(mask, dtype=torch.bool)
        # A new number begins a text, or the padding (0), which has no labels.
        begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    elif isinstance(positions, Tensor) and positions.shape == tokens.shape:
        begins = positions == 0
    else:
        return []
    texts = []
    for row, of_row in enumerate(begins):
        starts = of_row.nonzero()[:, 0].tolist()
        texts += [(row, start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return texts


def labels_in(tokens: TokenBatch, text: Text) -> list[tuple[int, int]]:
    """Return (row, column) of the labels of a text that count, without that of its first token."""
    row, start, end = text
    return [(row, column) for column in tokens.counted(row) if start < column < end]


def is_of_no_token(tokens: TokenBatch, value: Any) -> bool:
    """Return True for numbers such as pictures, of which no column is that of a token."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] != tokens.shape


def is_as_by_itself(trial: Trial, tokens: TokenBatch, text: Text) -> bool:
    """Return True if the labels of a text have the same loss in its packed row and in a batch of this text.

    Two losses of other labels are subtracted, as in `depends_on`.
    """
    places = labels_in(tokens, text)
    row, start, end = text
    alone = TokenBatch(with_inputs(tokens.batch, inputs_of_text(tokens, text)), trial.plain)
    differences, size = [], 0.0
    for batch, labels in (
        (tokens, tokens.only(places)),
        (alone, alone.only([(0, column - start) for _, column in places])),
    ):
        other = torch.where(
            labels == IGNORED_LABEL, labels, tokens.other_token(int(labels[labels != IGNORED_LABEL][0]))
        )
        losses = [batch.loss(trial.loop.loss, labels=each) for each in (labels, other)]
        differences.append(losses[0] - losses[1])
        size = max(size, *map(abs, losses))
    return abs(differences[0] - differences[1]) <= EQUAL * max(size, 1e-3)


def inputs_of_text(tokens: TokenBatch, text: Text) -> dict[str, Any]:
    """Return the arguments of the forward for a text by itself, whose positions begin at 0."""
    row, start, end = text
    rows, length = tokens.shape
    inputs = {}
    for key, value in tokens.inputs.items():
        if not isinstance(value, Tensor) or not value.dim() or len(value) != rows or key == LOSS_POSITIONS:
            continue  # such as the lengths of texts
        value = value[row : row + 1]
        for dim in range(1, value.dim()):
            if value.shape[dim] == length and (dim == 1 or value.dim() == 4):  # (1, L, ...), or a mask (1, 1, L, L)
                value = value.narrow(dim, start, end - start)
        inputs[key] = value
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"] - inputs["position_ids"][..., :1]
    return inputs
