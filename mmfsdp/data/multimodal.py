"""MultimodalProcessor: placeholders take as many tokens as the encoder makes of a picture or sound."""

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
from .processor import IMAGE, Processor, Row

AUDIO = "<audio>"
PLACEHOLDERS = {"vision": IMAGE, "audio": AUDIO}
RATE = 16_000
"""Samples of a second of sound, as Whisper takes it."""
HOP = 160
"""Samples of a frame of Whisper's features."""


def add_placeholders(tokenizer: Any, modalities: Iterable[str]) -> dict[str, int]:
    """Add the modalities' placeholders to a tokenizer, in place, where they are not there; their ids. A tokenizer that
    has no padding token pads with its end token. Raises ParamError if it has none."""
    if tokenizer.eos_token is None:
        raise ParamError("language.name", "its tokenizer has no end token to train on; choose one that sets eos_token")
    texts = {key: PLACEHOLDERS[key] for key in modalities}
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in texts.values()], special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return {key: tokenizer.convert_tokens_to_ids(text) for key, text in texts.items()}


@dataclass
class MultimodalProcessor(Processor):
    """As Processor, for a MultimodalModel: each `<image>` and `<audio>` becomes `counts` tokens, a turn ends with the
    tokenizer's own end token, and labels leave out placeholders, padding and, but for `learn_prompt`, prompts.
    """

    counts: dict[str, int] = field(default_factory=dict)
    """Tokens of one item, by modality (`MultimodalModel.num_tokens`)."""
    audio_shape: tuple[int, ...] = ()
    """Mel bands and frames of a sound; shorter ones are followed by silence."""
    learn_prompt: bool = False
    """Prompts carry loss, too."""

    def __post_init__(self) -> None:
        self.ids = add_placeholders(self.tokenizer, self.counts)
        self.image_id = self.ids.get("vision")
        self.end_id, self.pad_id = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id

    def collate(self, rows: Sequence[Row], *, left: bool = False) -> Batch:
        """Pad rows to one length and one number of items of each modality."""
        batch = super().collate(rows, left=left)
        if "vision" not in self.counts:
            del batch.media["vision"]
        if "audio" in self.counts:
            most = max([1, *(len(row.sounds) for row in rows)])
            audio = batch.media["audio"] = torch.zeros(batch.size, most, *self.audio_shape)
            for i, row in enumerate(rows):
                for t, sound in enumerate(row.sounds):
                    audio[i, t] = sound
        return batch

    def _labels(self, given: list[int], said: list[int]) -> list[int]:
        return [IGNORE if token in self.ids.values() else token for token in said]

    def _turns(self, sample: Sample) -> list[tuple[list[int], list[int]]]:
        """With each placeholder in full. Raises CorruptRecord."""
        turns = super()._turns(sample)
        count = sum(ids.count(self.ids.get("audio", -1)) for turn in turns for ids in turn)
        if count != len(sample.sounds):
            raise CorruptRecord(
                sample.name,
                f"has {count} {AUDIO} placeholders but {len(sample.sounds)} sounds; give one placeholder per sound",
            )
        each = {self.ids[key]: count for key, count in self.counts.items()}
        return [
            ([i for i in given for _ in range(each.get(i, 1))], [i for i in said for _ in range(each.get(i, 1))])
            for given, said in turns
        ]

    def _row(
        self, sample: Sample, ids: list[int], labels: list[int], *, cut: bool = False, seed: int | None = None
    ) -> Row:
        for key, each in self.counts.items():
            whole = len(ids) - ids.count(self.ids[key]) % each  # an item that max_length cuts through goes altogether
            ids, labels = ids[:whole], labels[:whole]
        if self.learn_prompt:
            labels = [IGNORE if not i or t in self.ids.values() else t for i, t in enumerate(ids)]
        items = {key: ids.count(self.ids[key]) // each for key, each in self.counts.items()}
        pictures = self._pictures(sample, items.get("vision", 0), seed)
        sounds = [self._sound(sample, sound) for sound in sample.sounds[: items.get("audio", 0)]]
        return Row(ids, labels, pictures, cut, sounds)

    def _sound(self, sample: Sample, sound: np.ndarray) -> Tensor:
        from transformers import WhisperFeatureExtractor

        mels, frames = self.audio_shape
        if len(sound) > frames * HOP:
            raise CorruptRecord(
                sample.name, f"has a sound of {len(sound) / RATE:.2f} s; the encoder takes {frames * HOP / RATE:.2f} s"
            )
        padded = np.pad(np.asarray(sound, dtype=np.float32), (0, frames * HOP - len(sound)))
        extract: Any = WhisperFeatureExtractor(feature_size=mels)
        found = extract(padded, sampling_rate=RATE, padding=False, truncation=False, return_tensors="pt")
        return found["input_features"][0]
