"""Answer: what a trained model says to one prompt, token by token, how sure it is of each, and what it needs to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..data.batch import Sample
from ..data.processor import SampleProcessor
from .evaluate import generate, without_pictures

TILES, SQUARE = 12, 3
"""Places along an edge of a map of what a word needs to see, and those that are covered at a time."""
MAX_VALUES = 2_000_000
"""Numbers in the pictures of one batch of covered ones."""


@dataclass(frozen=True)
class Answer:
    """The answer of a model to one prompt."""

    text: str
    tokens: tuple[tuple[str, float, str], ...]
    """(piece, its probability, the three likeliest pieces with theirs) of each new token, the end among them."""
    ids: torch.Tensor
    """(1, L): prompt and answer."""
    media: dict[str, torch.Tensor]


@torch.inference_mode()
def answer(model: Any, processor: SampleProcessor, sample: Sample, *, blank: bool = False) -> Answer:
    """Return what the model says to a sample's prompt, with probabilities. With `blank`, it sees empty pictures.

    Only the text is known where the processor shows no tokens: of a model of transformers, and of an own one.
    """
    batch, new_ids = generate(model, processor, [without_pictures(sample) if blank else sample])
    if not processor.shows_tokens:
        return Answer(processor.decode(new_ids)[0], (), torch.zeros(1, 0, dtype=torch.long), {})
    ids = torch.cat([batch.input_ids, new_ids], dim=1)
    prompt_length = batch.input_ids.shape[1]
    logits = model(ids, media=batch.media).logits[0, prompt_length - 1 : -1]
    tokens = []
    for token, chances in zip(new_ids[0].tolist(), logits.float().softmax(-1), strict=True):
        top = chances.topk(3)
        likely = []
        for chance, other in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            likely.append(f"{processor.piece(other)} {chance:.0%}")
        tokens.append((processor.piece(token), float(chances[token]), ", ".join(likely)))
    return Answer(processor.decode(new_ids)[0], tuple(tokens), ids, batch.media)


@torch.inference_mode()
def losses_by_covering(model: Any, said: Answer, *, tiles: int = TILES) -> torch.Tensor:
    """Return by how much less likely each token of an answer is with a place of its first picture covered.

    Shape (tokens, tiles, tiles), from -1 to 1. A square of SQUARE x SQUARE tiles is covered with the mean color of the
    picture; a tile has the mean of the squares that lie over it (occlusion: Zeiler and Fergus, 2014). Unlike attention,
    this is what the answer depends on. It takes (tiles + SQUARE - 1)² samples of a forward.
    """
    picture = said.media["vision"]
    height, width = picture.shape[-2:]
    rows = [round(edge * height / tiles) for edge in range(tiles + 1)]
    columns = [round(edge * width / tiles) for edge in range(tiles + 1)]
    mean = picture[0, 0].mean(dim=(-2, -1))
    before = torch.tensor([chance for _, chance, _ in said.tokens])
    losses, times = torch.zeros(len(said.tokens), tiles, tiles), torch.zeros(tiles, tiles)
    places = range(1 - SQUARE, tiles)
    squares = [(slice(max(0, y), y + SQUARE), slice(max(0, x), x + SQUARE)) for y in places for x in places]
    at_once = max(1, MAX_VALUES // picture[0].numel())
    for start in range(0, len(squares), at_once):
        batch = squares[start : start + at_once]
        covered = picture.expand(len(batch), *picture.shape[1:]).clone()
        for number, (down, right) in enumerate(batch):
            upper, lower = rows[down.start], rows[min(tiles, down.stop)]
            first, last = columns[right.start], columns[min(tiles, right.stop)]
            covered[number, 0, ..., upper:lower, first:last] = mean[..., None, None]
        media = {name: values.expand(len(batch), *values.shape[1:]) for name, values in said.media.items()}
        ids = said.ids.expand(len(batch), -1)
        logits = model(ids, media=media | {"vision": covered}).logits[:, -len(before) - 1 : -1].float()
        chances = logits.softmax(-1).gather(-1, ids[:, -len(before) :, None])[..., 0].cpu()  # (squares, tokens)
        for (down, right), after in zip(batch, chances, strict=True):
            losses[:, down, right] += (before - after)[:, None, None]
            times[down, right] += 1
    return losses / times
