"""Processor: samples to batches. It decides which tokens carry loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken
from torch import Tensor

from ...core.step_batch import loss_positions
from ...params import ParamError
from .batch import IGNORE, IMAGE, Batch, Sample
from .corrupt import CorruptRecord
from .pictures import to_tensor
from .sample_size import SampleSize, nothing_to_learn, picture_sizes

END_OF_CHUNK = "<|endofchunk|>"
PAD = "<pad>"


def add_special_tokens(tokenizer: Any) -> None:
    """Add END_OF_CHUNK, IMAGE and, if it has no padding token, PAD to a tokenizer, in place.

    The order is OpenFlamingo's, so that rows of released embeddings belong to the same tokens.
    """
    tokens = [AddedToken(text, special=True, normalized=False) for text in (END_OF_CHUNK, IMAGE)]
    tokenizer.add_tokens(tokens, special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": PAD})


def check_placeholders(sample: Sample) -> None:
    """Raise CorruptRecord unless a sample has as many placeholders as pictures."""
    placeholders = 0
    for message in sample.messages:
        placeholders += message.text.count(IMAGE)
    if placeholders != len(sample.images):
        words = f"has {placeholders} {IMAGE} placeholders but {len(sample.images)} pictures; "
        raise CorruptRecord(sample.name, words + "give one placeholder per picture")


@dataclass(frozen=True)
class EncodedSample:
    """One sample as token ids, labels and pictures (C, H, W)."""

    ids: list[int]
    labels: list[int]
    pictures: list[Tensor]
    truncated: bool = False


@dataclass
class SampleProcessor(ABC):
    """Turn samples into a Batch. Holds no state but its settings; can be pickled."""

    takes_given_rows: ClassVar[bool] = False
    """It takes the rows of a person's own reader as they are, not as samples."""
    shows_tokens: ClassVar[bool] = False
    """Its batches are those of a MediaModel, and it has `piece`, so that the tokens of an answer can be shown."""
    resizes_pictures: ClassVar[bool] = False
    """The model's own processor gets each picture at its size, and resizes it or cuts it into tiles."""
    tokenizer: Any
    image_size: int
    """Side of the pictures that a source draws for it, in pixels."""
    max_length: int = field(default=64, kw_only=True)
    augment: bool = field(default=False, kw_only=True)
    warnings: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Warnings by their code: what a person should know before training with it."""
    mask_padding: bool = field(default=True, kw_only=True)
    """The model must be told where a training batch is padded. Not so a causal one: no token sees the padding after it,
    and the padding has no loss."""
    gives_loss_positions: bool = field(default=False, kw_only=True)
    """The model's head computes the loss, and only at the positions that its batches name."""

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """Return a training batch, right-padded. Raises CorruptRecord (a ValueError) naming an unusable sample.

        No samples make a batch of one row without loss, for a rank that must take part in the step.
        """
        return self.collate([self.encode(sample) for sample in samples])

    @abstractmethod
    def encode(self, sample: Sample, *, seed: int | None = None) -> Any:
        """Return one sample, encoded; `seed` drives the augmentation (default: none). Raises CorruptRecord."""

    def filled(self, samples: list[Any], size: int) -> list[Any]:
        """Return encoded samples, in place of so many of which some could not be used."""
        return samples

    @abstractmethod
    def collate(self, samples: Sequence[Any]) -> Batch:
        """Return the batch of encoded samples; its `skipped` names those that only the whole batch shows unusable."""

    def loss_positions(self, labels: Tensor) -> Tensor | None:
        """Return the positions that predict one of the labels (B, L), if the model asks for them."""
        return loss_positions(labels) if self.gives_loss_positions else None

    def needed_mask(self, mask: Tensor) -> Tensor | None:
        """Return the mask (B, L) of a training batch, or None if the model computes the same loss without it.

        A mask costs the fast kernel of causal attention and, on a GPU, a wait to read it.
        """
        return mask if self.mask_padding and not bool(mask.all()) else None

    def measure(self, sample: Sample) -> SampleSize | None:
        """Return the size of a sample in a batch; its pictures may be headers. None if nobody knows it.

        Raises CorruptRecord for a sample that its size makes unusable.
        """
        return None

    @abstractmethod
    def prompts(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch of prompts to generate from, left-padded, without labels. Raises CorruptRecord."""

    def refusal(self, sample: Sample) -> str:
        """Return why a sample cannot be used, whatever the others of its batch; "" if it can."""
        try:
            self.encode(sample)
        except CorruptRecord as error:
            return error.reason
        return ""

    @property
    def can_prompt(self) -> bool:
        """Return True if it has what captions need: `prompts` and `decode`."""
        return True

    def piece(self, token: int) -> str:
        """Return the text of a token of an answer, for people."""
        raise NotImplementedError(f"{type(self).__name__} shows no tokens")

    def takes(self, sample: Sample) -> bool:
        """Return true if a sample asks about pictures that the processor takes, and so can be captioned."""
        return IMAGE in sample.prompt and not self.refusal(sample)

    def decode(self, ids: Any) -> list[str]:
        """Return the text of each row of (B, L) new ids, without special tokens."""
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]


@dataclass
class Processor(SampleProcessor):
    """Turn samples into a Batch of token ids and pictures of one size.

    A sequence is: the tokenizer's begin token if it sets one, prompt, text, END_OF_CHUNK, and the same for each further
    turn. Prompt and text are tokenized separately, so that generation from a prompt sees the same tokens as training.
    Labels follow OpenFlamingo (arXiv 2308.01390): loss on the text and on END_OF_CHUNK, none on placeholders, and in
    interleaved text none before the first picture nor between an END_OF_CHUNK and the next picture.
    """

    shows_tokens: ClassVar[bool] = True
    mean: Sequence[float]
    std: Sequence[float]
    picture_tokens: int = field(default=1, kw_only=True)
    """Tokens of a picture: each `<image>` becomes so many."""

    def __post_init__(self) -> None:
        add_special_tokens(self.tokenizer)
        self.image_id = self.tokenizer.convert_tokens_to_ids(IMAGE)
        self.end_id = self.tokenizer.convert_tokens_to_ids(END_OF_CHUNK)
        self.pad_id = self.tokenizer.pad_token_id

    def prompts(self, samples: Sequence[Sample]) -> Batch:
        """Return a batch of prompts to generate from, left-padded, without labels. Raises CorruptRecord."""
        encoded = []
        for sample in samples:
            ids, _ = self._turns(sample)[0]
            encoded.append(self._with_pictures(sample, ids, [IGNORE] * len(ids)))
        return self.collate(encoded, left=True)

    def decode(self, ids: Any) -> list[str]:
        """Return the text of each row of (B, L) ids up to the first END_OF_CHUNK or end token, no special tokens."""
        ends = {self.end_id, self.tokenizer.eos_token_id}
        rows = []
        for row in ids.tolist():
            row = dropwhile(lambda token: token == self.pad_id, row)
            rows.append(list(takewhile(lambda token: token not in ends, row)))
        return super().decode(rows)

    def piece(self, token: int) -> str:
        """Return the text of a token; (end) for END_OF_CHUNK."""
        return "(end)" if token == self.end_id else self.tokenizer.decode([token])

    def encode(self, sample: Sample, *, seed: int | None = None) -> EncodedSample:
        """Return one sample, encoded; `seed` drives the augmentation (default: none). Raises CorruptRecord."""
        ids, labels, length = self._row(sample)
        seed = seed if self.augment else None
        return self._with_pictures(sample, ids, labels, truncated=length > self.max_length, seed=seed)

    def measure(self, sample: Sample) -> SampleSize:
        """Return the length of its row and the number of its pictures. Raises CorruptRecord."""
        ids, _, _ = self._row(sample)
        count, cut = self._whole_pictures(ids)
        return SampleSize(len(ids) - cut, count * self.picture_tokens, sample.label, picture_sizes(sample))

    def _row(self, sample: Sample) -> tuple[list[int], list[int], int]:
        """Return ids and labels, cut at max_length, and their length before. Raises CorruptRecord."""
        ids: list[int] = []
        labels: list[int] = []
        for prompt, text in self._turns(sample):
            ids += prompt
            labels += [IGNORE] * len(prompt) + self._labels(ids, text)
            ids += text
        length = len(ids)
        ids, labels = ids[: self.max_length], labels[: self.max_length]
        labels[0] = IGNORE  # nothing precedes the first token, so nothing predicts it
        if all(label == IGNORE for label in labels):
            raise CorruptRecord(sample.name, nothing_to_learn(self.max_length, length))
        return ids, labels, length

    def collate(self, samples: Sequence[EncodedSample], *, left: bool = False) -> Batch:
        """Pad samples to one length and one number of pictures."""
        samples = samples or [EncodedSample([self.end_id], [IGNORE], [])]
        length = max(len(sample.ids) for sample in samples)
        pictures = max(1, *(len(sample.pictures) for sample in samples))
        ids = torch.full((len(samples), length), self.pad_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
        vision = torch.zeros(len(samples), pictures, 1, 3, self.image_size, self.image_size)
        for i, sample in enumerate(samples):
            used = slice(length - len(sample.ids), None) if left else slice(len(sample.ids))
            ids[i, used], labels[i, used] = torch.tensor(sample.ids), torch.tensor(sample.labels)
            mask[i, used] = 1
            for t, picture in enumerate(sample.pictures):
                vision[i, t, 0] = picture
        truncated = sum(sample.truncated for sample in samples)
        if left:
            return Batch(ids, mask, None, {"vision": vision}, truncated=truncated)
        return Batch(
            ids,
            self.needed_mask(mask),
            labels,
            {"vision": vision},
            truncated=truncated,
            padded=int((mask == 0).sum()),
            loss_positions=self.loss_positions(labels),
        )

    def _labels(self, before: list[int], text: list[int]) -> list[int]:
        """Return the text's labels; see the class."""
        learning = self.image_id in before or self.image_id not in text
        labels = []
        for token in text:
            learning = learning or token == self.image_id
            labels.append(token if learning and token != self.image_id else IGNORE)
            learning = learning and token != self.end_id
        return labels

    def _turns(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each turn's prompt and text. Raises CorruptRecord."""
        check_placeholders(sample)
        begin = [token for token in self.tokenizer("").input_ids if token == self.tokenizer.bos_token_id]
        turns: list[tuple[list[int], list[int]]] = []
        for prompt, text in sample.turns:
            if not text.strip():
                raise CorruptRecord(sample.name, "has no text; give it a caption")
            text_ids = self._tokens(text)
            if not text_ids or text_ids[-1] != self.end_id:
                text_ids.append(self.end_id)
            turns.append((begin + self._tokens(prompt), text_ids))
            begin = []  # only before the first turn
        return turns

    def _tokens(self, text: str) -> list[int]:
        """Return the ids of a text, with each placeholder as often as its picture has tokens."""
        ids: list[int] = []
        for token in self.tokenizer(text, add_special_tokens=False).input_ids if text else []:
            ids += [token] * (self.picture_tokens if token == self.image_id else 1)
        return ids

    def _whole_pictures(self, ids: list[int]) -> tuple[int, int]:
        """Return the number of pictures that ids announce in full, and the tokens of one that is cut."""
        return divmod(ids.count(self.image_id), self.picture_tokens)

    def _with_pictures(
        self, sample: Sample, ids: list[int], labels: list[int], *, truncated: bool = False, seed: int | None = None
    ) -> EncodedSample:
        """Return a sample with the pictures that its ids still announce in full."""
        count, cut = self._whole_pictures(ids)
        end = len(ids) - cut  # drop a picture that max_length has cut
        pictures = []
        for i, image in enumerate(sample.images[:count]):
            own_seed = None if seed is None else seed + i
            pictures.append(to_tensor(image, size=self.image_size, mean=self.mean, std=self.std, seed=own_seed))
        return EncodedSample(ids[:end], labels[:end], pictures, truncated)


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
    """Turn samples into a Batch for a MultimodalModel that takes pictures (`picture_tokens`: its `num_tokens`).

    A turn ends with the tokenizer's own end token, and labels leave out placeholders, padding and prompts.
    """

    def __post_init__(self) -> None:
        self.image_id = add_placeholder(self.tokenizer)
        self.end_id, self.pad_id = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def _labels(self, before: list[int], text: list[int]) -> list[int]:
        return [IGNORE if token == self.image_id else token for token in text]
