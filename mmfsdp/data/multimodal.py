"""MultimodalProcessor: a placeholder becomes as many tokens as the encoder makes of the picture or sound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken
from torch import Tensor

from ..params import ParamError
from .batch import IGNORE, Batch, Sample
from .pictures import CorruptRecord
from .processor import IMAGE, EncodedSample, Processor, _count

AUDIO = "<audio>"
PLACEHOLDERS = {"vision": IMAGE, "audio": AUDIO}
RATE = 16_000
"""Samples of a second of sound, as Whisper takes it."""
HOP = 160
"""Samples of a frame of Whisper's features."""


def add_placeholders(tokenizer: Any, modalities: Iterable[str]) -> dict[str, int]:
    """Add the modalities' placeholders to a tokenizer, in place, and return their ids.

    A tokenizer without a padding token then pads with its end token. Raises ParamError if it has no end token.
    """
    if tokenizer.eos_token is None:
        raise ParamError("language.name", "its tokenizer has no end token to train on; choose one that sets eos_token")
    texts = {key: PLACEHOLDERS[key] for key in modalities}
    tokens = [AddedToken(text, special=True, normalized=False) for text in texts.values()]
    tokenizer.add_tokens(tokens, special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return {key: tokenizer.convert_tokens_to_ids(text) for key, text in texts.items()}


@dataclass
class MultimodalProcessor(Processor):
    """Turn samples into a Batch for a MultimodalModel.

    Each `<image>` and `<audio>` becomes `counts` tokens, a turn ends with the tokenizer's own end token, and labels
    leave out placeholders, padding and prompts.
    """

    counts: dict[str, int] = field(default_factory=dict)
    """Tokens of one item, by modality (`MultimodalModel.num_tokens`)."""
    audio_shape: tuple[int, ...] = ()
    """Mel bands and frames of a sound; shorter sounds are padded with silence."""

    def __post_init__(self) -> None:
        self.ids = add_placeholders(self.tokenizer, self.counts)
        self.image_id = self.ids.get("vision")
        self.end_id, self.pad_id = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def collate(self, samples: Sequence[EncodedSample], *, left: bool = False) -> Batch:
        """Pad samples to one length and one number of items of each modality."""
        batch = super().collate(samples, left=left)
        if "vision" not in self.counts:
            del batch.media["vision"]
        if "audio" in self.counts:
            sounds = max([1, *(len(sample.sounds) for sample in samples)])
            batch.media["audio"] = torch.zeros(batch.size, sounds, *self.audio_shape)
            for i, sample in enumerate(samples):
                for t, sound in enumerate(sample.sounds):
                    batch.media["audio"][i, t] = sound
        return batch

    def _labels(self, before: list[int], text: list[int]) -> list[int]:
        return [IGNORE if token in self.ids.values() else token for token in text]

    def _turns(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        turns = super()._turns(sample)
        placeholders = _count(turns, self.ids.get("audio", -1))
        if placeholders != len(sample.sounds):
            message = f"has {placeholders} {AUDIO} placeholders but {len(sample.sounds)} sounds; "
            raise CorruptRecord(sample.name, message + "give one placeholder per sound")
        return [(self._repeated(prompt), self._repeated(text)) for prompt, text in turns]

    def _repeated(self, ids: list[int]) -> list[int]:
        """Return the ids with each placeholder as often as its item has tokens."""
        repeats = {self.ids[key]: count for key, count in self.counts.items()}
        repeated = []
        for token in ids:
            repeated += [token] * repeats.get(token, 1)
        return repeated

    def _with_media(
        self, sample: Sample, ids: list[int], labels: list[int], *, truncated: bool = False, seed: int | None = None
    ) -> EncodedSample:
        for key, each in self.counts.items():
            end = len(ids) - ids.count(self.ids[key]) % each  # drop an item that max_length has cut
            ids, labels = ids[:end], labels[:end]
        items = {key: ids.count(self.ids[key]) // each for key, each in self.counts.items()}
        pictures = self._pictures(sample, items.get("vision", 0), seed)
        sounds = [self._sound(sample, sound) for sound in sample.sounds[: items.get("audio", 0)]]
        return EncodedSample(ids, labels, pictures, truncated, sounds)

    def _sound(self, sample: Sample, sound: np.ndarray) -> Tensor:
        """Return a sound's log-mel features, (mels, frames). Raises CorruptRecord if it is too long."""
        from transformers import WhisperFeatureExtractor

        mels, frames = self.audio_shape
        if len(sound) > frames * HOP:
            message = f"has a sound of {len(sound) / RATE:.2f} s; the encoder takes {frames * HOP / RATE:.2f} s"
            raise CorruptRecord(sample.name, message)
        padded = np.pad(np.asarray(sound, dtype=np.float32), (0, frames * HOP - len(sound)))
        extractor: Any = WhisperFeatureExtractor(feature_size=mels)
        features = extractor(padded, sampling_rate=RATE, padding=False, truncation=False, return_tensors="pt")
        return features["input_features"][0]
