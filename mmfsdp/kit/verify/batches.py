"""The batches of a trial: of the first rows of the data, or of random values where no tokenizer is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...core.step_batch import IGNORED_LABEL, MappingBatch
from ...params import ParamError, RunParams
from ..data.batch import IMAGE, Sample
from ..data.corrupt import CorruptRecord
from ..data.media import PICTURE, PICTURE_NAME, media_of
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from ..data.rows.row_values import PICTURE_KEYS
from ..data.sources.stream import GivenRow
from ..models.kinds import kind_of

TEXT_TOKENS = 32
"""Tokens of a row of random values, beside those of its picture."""
MAX_ROWS = 1000
"""Rows that are looked at for some that can be used."""
TENSOR_KEYS = (*PICTURE_KEYS, "pictures", "video", "videos", "pixels")
"""Keys of pictures that may be tensors or arrays, which only a person's own reader and processor know."""


@dataclass(frozen=True)
class TrialBatches:
    """The batches of a trial."""

    of_ranks: list[Any]
    joined: Any
    """All rows in one batch."""
    without_picture: Any = None
    """The last rank's rows without their pictures; None if there can be none."""
    note: str = ""
    """The reason why not."""
    labels_of_prompt: bool | None = None
    """A longer prompt has more labels; None if the rows have no prompt that is known."""


def batches_of_data(
    params: RunParams, processor: SampleProcessor, sources: Mapping[str, Splits], ranks: int
) -> TrialBatches:
    """Return batches of the first rows. Raises ParamError if none can be used."""
    processor = replace(processor, max_length=params.data.max_length, augment=False)
    size = params.train.batch_size
    rows: list[Any] = []
    for row in islice(sources["data"]["train"], MAX_ROWS):
        if not refusal(processor, row):
            rows.append(row)
        if len(rows) == ranks * size:
            break
    if not rows:
        raise ParamError("data", f"none of the first {MAX_ROWS} rows can be used")
    # Few rows are used several times: the checks need full batches, not new rows.
    rows = [rows[i % len(rows)] for i in range(ranks * size)]
    of_ranks = [batch_of(processor, rows[rank * size : (rank + 1) * size]) for rank in range(ranks)]
    without, note = _without_picture(processor, rows[-size:])
    prompts = labels_of_prompt(processor, rows[0])
    return TrialBatches(of_ranks, batch_of(processor, rows), without, note, prompts)


def batch_of(processor: SampleProcessor, rows: list[Any]) -> Any:
    """Return the batch of some rows."""
    return processor.collate([processor.encode(row, seed=0) for row in rows])


def refusal(processor: SampleProcessor, row: Any) -> str:
    """Return why a row cannot be used; "" if it can."""
    if isinstance(row, CorruptRecord):
        return row.reason
    return processor.refusal(row)


def labels_of_prompt(processor: SampleProcessor, row: Any) -> bool | None:
    """Return True if a row has more labels with a longer prompt; None if it has none, or if labels are not tokens."""
    if not isinstance(row, Sample) or not row.prompt.replace(IMAGE, "").strip():
        return None
    first, *others = row.messages
    # Its own prompt once more, without a second picture.
    longer = replace(row, messages=(replace(first, text=f"{first.text} {first.text.replace(IMAGE, '')}"), *others))
    counts = []
    for each in (row, longer):
        labels = batch_of(processor, [each]).inputs().get("labels")
        if not isinstance(labels, Tensor) or labels.dim() != 2:
            return None
        counts.append(int((labels != IGNORED_LABEL).sum()))
    return counts[1] > counts[0]


def _without_picture(processor: SampleProcessor, rows: list[Any]) -> tuple[Any, str]:
    stripped = [strip_pictures(row) for row in rows]
    if any(row is None for row in stripped):
        return None, "the rows of your reader have no picture under a name that is known here"
    for row in stripped:
        if why := refusal(processor, row):
            return None, f"a row without a picture is skipped, and no batch has one ({why})"
    return batch_of(processor, stripped), ""


def strip_pictures(row: Any) -> Any:
    """Return a row without its pictures; None if nobody knows where they are."""
    if isinstance(row, Sample):
        messages = tuple(replace(message, text=message.text.replace(IMAGE, "")) for message in row.messages)
        return replace(row, images=(), messages=messages)
    if isinstance(row, GivenRow) and isinstance(row.row, dict):
        kept = {key: value for key, value in row.row.items() if not _is_picture(key, value)}
        return GivenRow(kept, row.name) if len(kept) < len(row.row) else None
    return None


def _is_picture(key: str, value: Any) -> bool:
    """Return whether a row has a picture under a key: by what it is, or by the key where it is a tensor."""
    return key in TENSOR_KEYS or media_of(value) in (PICTURE, PICTURE_NAME)


def random_batches(model: nn.Module, params: RunParams, ranks: int) -> TrialBatches:
    """Return batches of random values, in the shapes of the plan. Raises ParamError where nobody knows them."""
    example = None
    kind = kind_of(params.model)
    picture = kind.picture_ids(model)
    length = min(params.data.max_length, len(picture) + TEXT_TOKENS)
    if len(picture) >= length:
        raise ParamError("data.max_length", f"is too short for a picture of {len(picture)} tokens; raise it")
    while example is None:
        try:
            sized = params.change(**{"train.batch_size": ranks * params.train.batch_size, "data.max_length": length})
            example = kind.example(model, sized, None)
        except ParamError:  # too short for a picture
            if length >= params.data.max_length:
                raise
            length = min(2 * length, params.data.max_length)
            continue
        if example is None:
            words = "has no processor on this machine, and no `picture` that says what it makes of one"
            raise ParamError("model", f"{words}; set model.name to a folder, or model.picture")
    generator = torch.Generator().manual_seed(0)
    example["input_ids"], example["labels"] = _random_ids(picture, example["input_ids"], generator)
    example = {key: tree_map(lambda value: _random(value, generator), value) for key, value in example.items()}
    of_ranks = [MappingBatch(_part(example, rank, ranks)) for rank in range(ranks)]
    return TrialBatches(of_ranks, MappingBatch(example), note="there is no tokenizer on this machine")


def _random_ids(picture: list[int], ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens with a picture's at the beginning of each row, or where `ids` have one already, and labels."""
    text = torch.randint(3, 40, ids.shape, generator=generator)
    is_picture = ids != 0 if not picture else (torch.arange(ids.shape[1]) < len(picture)).expand(ids.shape)
    tokens = text.clone()
    tokens[is_picture] = torch.tensor(picture * len(ids)) if picture else ids[is_picture]
    return tokens, text.masked_fill(is_picture, -100)


def _random(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    return value


def _part(example: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's part of a batch: all its tensors have a row, or several, for each sample."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.chunk(ranks)[rank]

    return tree_map(cut, example)
