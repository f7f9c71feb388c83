"""Processor: samples to batches. It decides what is loss and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

from .batch import IGNORE, Batch, Sample
from .pictures import CorruptRecord, stable_hash, to_tensor

IMAGE = "<image>"
END_OF_CHUNK = "<|endofchunk|>"
PAD = "<pad>"


def add_special_tokens(tokenizer: Any) -> list[str]:
    """Add END_OF_CHUNK, IMAGE and, where it has no padding token, PAD to a tokenizer, in place; those that are there
    stay. The order is OpenFlamingo's, so that rows of released embeddings belong to the same tokens. Returns what was
    added."""
    before = set(tokenizer.get_vocab())
    wanted = [AddedToken(t, special=True, normalized=False) for t in (END_OF_CHUNK, IMAGE)]
    tokenizer.add_tokens(wanted, special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": PAD})
    return [t for t in (END_OF_CHUNK, IMAGE, PAD) if t in tokenizer.get_vocab() and t not in before]


@dataclass(frozen=True)
class Row:
    """One sample as token ids, labels and pictures (T, C, H, W)."""

    ids: list[int]
    labels: list[int]
    pictures: list[Tensor]
    cut: bool = False
    sounds: list[Tensor] = field(default_factory=list)


@dataclass
class Processor:
    """Turns samples into a Batch. Holds no state but its settings; can be pickled.

    A sequence is: the tokenizer's begin token if it sets one, prompt, text, END_OF_CHUNK, and so for every further
    turn. Prompt and text are
    tokenized apart, so that generation from a prompt sees the very tokens that training saw. Labels follow
    OpenFlamingo (arXiv 2308.01390): loss on the text and on END_OF_CHUNK, none on placeholders, and in interleaved
    text none before the first picture nor between an END_OF_CHUNK and the next picture.
    """

    tokenizer: Any
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]
    max_length: int = 64
    augment: bool = False

    def __post_init__(self) -> None:
        add_special_tokens(self.tokenizer)
        self.image_id = self.tokenizer.convert_tokens_to_ids(IMAGE)
        self.end_id = self.tokenizer.convert_tokens_to_ids(END_OF_CHUNK)
        self.pad_id = self.tokenizer.pad_token_id

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """A training batch, right-padded. Raises CorruptRecord (a ValueError) naming the sample that cannot be used.

        No samples at all make a batch of one row that has nothing to learn from, for a rank that must keep step.
        """
        return self.collate([self.encode(sample) for sample in samples])

    def prompts(self, samples: Sequence[Sample]) -> Batch:
        """A batch of prompts alone to generate from, left-padded, without labels. Raises CorruptRecord."""
        rows = []
        for sample in samples:
            ids, _ = self._turns(sample)[0]
            if not ids:
                raise CorruptRecord(sample.name, f"has an empty prompt; give at least {IMAGE} or a word")
            rows.append(self._row(sample, ids, [IGNORE] * len(ids)))
        return self.collate(rows, left=True)

    def takes(self, sample: Sample) -> bool:
        """Whether a sample has pictures and can be captioned."""
        try:
            return bool(sample.images and self.encode(sample).ids and self._turns(sample)[0][0])
        except CorruptRecord:
            return False

    def decode(self, ids: Tensor) -> list[str]:
        """The text of each row of (B, L) token ids, up to the first END_OF_CHUNK or end token, no special tokens."""
        ends = {self.end_id, self.tokenizer.eos_token_id}
        texts = []
        for row in ids.tolist():
            row = list(dropwhile(lambda token: token == self.pad_id, row))
            row = list(takewhile(lambda token: token not in ends, row))
            texts.append(self.tokenizer.decode(row, skip_special_tokens=True).strip())
        return texts

    def encode(self, sample: Sample, *, seed: int | None = None) -> Row:
        """One sample; `seed` drives the augmentation (default: from the sample's name). Raises CorruptRecord."""
        ids: list[int] = []
        labels: list[int] = []
        for given, said in self._turns(sample):
            ids += given
            labels += [IGNORE] * len(given) + self._labels(ids, said)
            ids += said
        length = len(ids)
        ids, labels = ids[: self.max_length], labels[: self.max_length]
        labels[0] = IGNORE  # nothing precedes the first token, so nothing predicts it
        if all(label == IGNORE for label in labels):
            raise CorruptRecord(
                sample.name,
                f"has no token to learn from in its first {self.max_length} of {length}; "
                "raise max_length or shorten the prompt",
            )
        seed = stable_hash(sample.name) if seed is None else seed
        return self._row(sample, ids, labels, cut=length > self.max_length, seed=seed if self.augment else None)

    def collate(self, rows: Sequence[Row], *, left: bool = False) -> Batch:
        """Pad rows to one length and one number of pictures."""
        rows = rows or [Row([self.end_id], [IGNORE], [])]
        length = max(len(row.ids) for row in rows)
        shape = (len(rows), max([1, *(len(row.pictures) for row in rows)]), 1, 3, self.image_size, self.image_size)
        ids = torch.full((len(rows), length), self.pad_id)
        mask, labels, vision = torch.zeros_like(ids), torch.full_like(ids, IGNORE), torch.zeros(shape)
        for i, row in enumerate(rows):
            place = slice(length - len(row.ids), None) if left else slice(len(row.ids))
            ids[i, place], labels[i, place] = torch.tensor(row.ids), torch.tensor(row.labels)
            mask[i, place] = 1
            for t, picture in enumerate(row.pictures):
                vision[i, t, 0] = picture
        return Batch(ids, mask, None if left else labels, {"vision": vision})

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids if text else []

    def _start(self) -> list[int]:
        return [i for i in self.tokenizer("").input_ids if i == self.tokenizer.bos_token_id]

    def _labels(self, given: list[int], said: list[int]) -> list[int]:
        """Loss positions of the text; see the class."""
        learning = self.image_id in given or self.image_id not in said
        labels = []
        for token in said:
            learning = learning or token == self.image_id
            labels.append(token if learning and token != self.image_id else IGNORE)
            learning = learning and token != self.end_id
        return labels

    def _turns(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """What is given and what is said, turn by turn, as token ids. Raises CorruptRecord."""
        turns: list[tuple[list[int], list[int]]] = []
        for prompt, text in [(sample.prompt, sample.text), *sample.more]:
            if not text.strip():
                raise CorruptRecord(sample.name, "has no text; give it a caption")
            said = self._tokens(text)
            said += [] if said and said[-1] == self.end_id else [self.end_id]
            turns.append(((self._start() if not turns else []) + self._tokens(prompt), said))
        count = sum(ids.count(self.image_id) for turn in turns for ids in turn)
        if count != len(sample.images):
            raise CorruptRecord(
                sample.name,
                f"has {count} {IMAGE} placeholders but {len(sample.images)} pictures; give one placeholder per picture",
            )
        return turns

    def _row(
        self, sample: Sample, ids: list[int], labels: list[int], *, cut: bool = False, seed: int | None = None
    ) -> Row:
        return Row(ids, labels, self._pictures(sample, ids.count(self.image_id), seed), cut)

    def _pictures(self, sample: Sample, count: int, seed: int | None = None) -> list[Tensor]:
        return [
            to_tensor(
                image, size=self.image_size, mean=self.mean, std=self.std, seed=None if seed is None else seed + i
            )
            for i, image in enumerate(sample.images[:count])
        ]
