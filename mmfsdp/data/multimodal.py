"""MultimodalProcessor: a placeholder becomes as many tokens as the encoder makes of the picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from ..params import ParamError
from .batch import IGNORE, Sample
from .processor import IMAGE, EncodedSample, Processor


def add_placeholder(tokenizer: Any) -> int:
    """Add the placeholder of a picture to a tokenizer, in place, and return its id.

    A tokenizer without a padding token then pads with its end token. Raises ParamError if it has no end token.
    """
    if tokenizer.eos_token is None:
        raise ParamError("language.name", "its tokenizer has no end token to train on; choose one that sets eos_token")
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False)], special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer.convert_tokens_to_ids(IMAGE)


@dataclass
class MultimodalProcessor(Processor):
    """Turn samples into a Batch for a MultimodalModel that takes pictures.

    Each `<image>` becomes `picture_tokens` tokens, a turn ends with the tokenizer's own end token, and labels leave out
    placeholders, padding and prompts.
    """

    picture_tokens: int = field(kw_only=True)
    """Tokens of a picture (`MultimodalModel.num_tokens`)."""

    def __post_init__(self) -> None:
        self.image_id = add_placeholder(self.tokenizer)
        self.end_id, self.pad_id = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def _labels(self, before: list[int], text: list[int]) -> list[int]:
        return [IGNORE if token == self.image_id else token for token in text]

    def _turns(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        return [(self._repeated(prompt), self._repeated(text)) for prompt, text in super()._turns(sample)]

    def _repeated(self, ids: list[int]) -> list[int]:
        """Return the ids with each placeholder as often as its picture has tokens."""
        repeated = []
        for token in ids:
            repeated += [token] * (self.picture_tokens if token == self.image_id else 1)
        return repeated

    def _with_media(
        self, sample: Sample, ids: list[int], labels: list[int], *, truncated: bool = False, seed: int | None = None
    ) -> EncodedSample:
        end = len(ids) - ids.count(self.image_id) % self.picture_tokens  # drop a picture that max_length has cut
        ids, labels = ids[:end], labels[:end]
        pictures = self._pictures(sample, ids.count(self.image_id) // self.picture_tokens, seed)
        return EncodedSample(ids, labels, pictures, truncated)
