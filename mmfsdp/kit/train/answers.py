"""Answer: what a trained model says to one prompt, token by token, and how sure it is of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..data.batch import Sample
from ..data.processor import SampleProcessor
from .evaluate import generate, without_pictures


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
