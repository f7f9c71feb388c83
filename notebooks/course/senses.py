"""Material of 09_multimodal_any: pictures with sounds, a model that sees and hears, and documents of several pictures.

A sound's beeps say how many there are, its pitch how large; what they look like is in the picture alone.
"""

from __future__ import annotations

import math
import random
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from io import BytesIO
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken
from torch import nn
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmfsdp import ModalEncoder, MultimodalModel, RunParams, build_model
from mmfsdp.kit.data import MultimodalProcessor
from mmfsdp.kit.data.batch import Batch, Sample
from mmfsdp.kit.data.processor import END_OF_CHUNK, IMAGE
from mmfsdp.kit.shapes.drawing import render
from mmfsdp.kit.shapes.scenes import COUNTS, SIZES, Combination, draw_scene, split_combinations
from mmfsdp.kit.train.evaluate import captions
from mmfsdp.kit.widgets.markup import path, svg
from mmfsdp.kit.widgets.style import FROZEN
from mmfsdp.params import load

WORDS = ("count", "size", "color", "shape")
TOKENS = 12
"""Tokens that the ear makes of a sound: 20 ms each."""
PITCH = {"small": 1600.0, "large": 300.0}
AUDIO = "<audio>"
RATE = 16_000
"""Samples of a second of sound, as Whisper takes it."""
HOP = 160
"""Samples of a frame of Whisper's features."""
MELS = 20


class Ear(nn.Module):
    """An encoder of your own, with `item_shape`, `num_tokens` and `dim`. Its layers are those of Whisper's encoder."""

    item_shape, num_tokens, dim = (MELS, 2 * TOKENS), TOKENS, 48

    def __init__(self) -> None:
        super().__init__()
        sizes = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": MELS}
        self.audio = WhisperEncoder(WhisperConfig(d_model=self.dim, max_source_positions=TOKENS, **sizes))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(N, mels, frames) -> (N, tokens, width)."""
        return self.audio(features).last_hidden_state


@dataclass(frozen=True)
class HeardSample(Sample):
    """A sample with a sound, for each of which the prompt has TOKENS placeholders `<audio>`."""

    sounds: tuple[np.ndarray, ...] = ()


class HearingProcessor(MultimodalProcessor):
    """The processor of pictures, which adds the features of each sample's sound."""

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        return with_sounds(super().__call__(samples), samples)

    def prompts(self, samples: Sequence[Sample]) -> Batch:
        return with_sounds(super().prompts(samples), samples)


def with_sounds(batch: Batch, samples: Sequence[Any]) -> Batch:
    """The batch with a sound a sample: (samples, 1, mels, frames)."""
    return replace(batch, media={**batch.media, "audio": torch.stack([features(s.sounds[0])[None] for s in samples])})


def features(wave: np.ndarray) -> torch.Tensor:
    """Log-mel features of a sound, as Whisper takes them."""
    extractor: Any = transformers.WhisperFeatureExtractor(feature_size=MELS)
    made = extractor(wave, sampling_rate=RATE, padding=False, truncation=False, return_tensors="pt")
    return made["input_features"][0]


def senses(*, lora_rank: int | None = None, meta: bool = False) -> tuple[MultimodalModel, HearingProcessor]:
    """The model of the lesson, the demo's CLIP and language model and an ear, and its processor."""
    tiny = pretrained().model
    params = tiny.change(kind="multimodal", freeze=("llava_stage1",), lora_rank=lora_rank)
    seeing, its = build_model(params, meta=meta)
    its.tokenizer.add_tokens([AddedToken(AUDIO, special=True, normalized=False)], special_tokens=True)
    with next(seeing.parameters()).device:
        ear = Ear()
    encoders = {
        "vision": ModalEncoder(seeing.encoders["vision"], seeing.projectors["vision"]),
        "audio": ModalEncoder(ear, "mlp"),
    }
    placeholders = {"vision": its.image_id, "audio": its.tokenizer.convert_tokens_to_ids(AUDIO)}
    model = MultimodalModel(encoders, seeing.language_model, placeholders=placeholders)
    model.tokens = seeing.tokens
    return model, HearingProcessor(
        its.tokenizer, its.image_size, its.mean, its.std, picture_tokens=model.num_tokens["vision"]
    )


def pretrained() -> RunParams:
    """The demo's parameters. Its two backbones ship with the package; with changed sizes they are pretrained here."""
    from mmfsdp.kit.shapes.pretrain import ensure_backbones

    transformers.utils.logging.disable_progress_bar()
    params = load("tiny")
    ensure_backbones(params)
    return params


def sound(count: int, size: str, rng: random.Random) -> np.ndarray:
    """A quarter of a second with so many beeps, deep for large things and high for small ones."""
    seconds = TOKENS * 2 * HOP / RATE
    time = np.arange(int(seconds * RATE)) / RATE
    beat = seconds / len(COUNTS)
    on = (time // beat < count) & (time % beat < 0.6 * beat)
    return (0.5 * on * np.sin(2 * np.pi * PITCH[size] * rng.uniform(0.9, 1.1) * time)).astype(np.float32)


def sample(index: int, split: str = "train") -> Sample:
    """One shape in the picture; the sound says how many of them are meant, and how large."""
    rng = random.Random(f"{split}/{index}")
    single = tuple(c for c in split_combinations()[0] if c.count == 1)
    scene = draw_scene(rng, single)
    (group,) = scene.groups
    count, size = rng.randint(1, len(COUNTS)), rng.choice(list(SIZES))
    said = Combination(count, size, group.combination.color, group.combination.shape)
    name = f"{split}/{index}"
    return HeardSample.of(
        f"{IMAGE} {AUDIO * TOKENS}", str(said), (render(scene, 48),), name, sounds=(sound(count, size, rng),)
    )


def pretrain_ear(model: Any, *, steps: int = 80) -> float:
    """The ear learns to tell its eight kinds of sound apart; returns the share it gets right at the end."""
    ear, rng = model.encoders.audio, random.Random(0)
    kinds = [(count, size) for count in range(1, len(COUNTS) + 1) for size in PITCH]
    heard = [(features(sound(*kinds[i % 8], rng)), i % 8) for i in range(256)]
    sounds, kind = torch.stack([x for x, _ in heard]), torch.tensor([k for _, k in heard])
    head = nn.Linear(ear.dim, len(kinds))
    optimizer = torch.optim.AdamW([*ear.parameters(), *head.parameters()], lr=3e-3)
    right = 0.0
    for step in range(steps):
        some = torch.tensor(random.Random(step).sample(range(256), 32))
        guess = head(ear(sounds[some])).flatten(0, 1)
        target = kind[some].repeat_interleave(TOKENS)
        optimizer.zero_grad()
        nn.functional.cross_entropy(guess, target).backward()
        optimizer.step()
        right = (guess.argmax(-1) == target).float().mean().item()
    return right


@dataclass
class Seen:
    """Samples as one batch, with what the frozen encoders make of their media: computed once, used in every step."""

    samples: Sequence[Sample]
    batch: Batch

    @classmethod
    @torch.no_grad()
    def by(cls, model: Any, processor: Any, samples: Sequence[Sample]) -> Seen:
        batch = processor(samples)
        media = {}
        for key, items in batch.media.items():
            encoder = model.encoders[key] if hasattr(model, "encoders") else model.vision_encoder
            lead = items.shape[: -len(encoder.item_shape)]
            flat = items.flatten(0, len(lead) - 1).split(64)
            media[f"{key}_features"] = torch.cat([encoder(part) for part in flat]).unflatten(0, lead)
        return cls(samples, replace(batch, media=media))

    def some(self, step: int, count: int) -> dict[str, Any]:
        """Inputs of a random few."""
        rows = torch.tensor(random.Random(step).sample(range(self.batch.size), count))
        values = self.batch.inputs()
        return {
            key: {k: v[rows] for k, v in value.items()} if key == "media" else value[rows]
            for key, value in values.items()
        }


def fit(model: Any, seen: Seen, *, steps: int, lr: float, batch: int = 16) -> list[float]:
    """Train what is trainable; the losses."""
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=lr)
    losses = []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = model(**seen.some(step, batch)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trains, 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def word_by_word(model: Any, processor: Any, samples: Sequence[Sample], *, without: str = "") -> dict[str, float]:
    """Share of right words by their place in the caption; `without` a medium (audio, vision), which is then empty."""

    class Deaf:
        """The processor with an empty medium."""

        def __getattr__(self, name: str) -> Any:
            return getattr(processor, name)

        def prompts(self, some: Sequence[Sample]) -> Batch:
            found = processor.prompts(some)
            return replace(found, media={k: v * 0 if k == without else v for k, v in found.media.items()})

    said = captions(model, Deaf(), samples)  # type: ignore[arg-type]
    pairs = [(a.split(), b.text.split()) for a, b in zip(said, samples, strict=True)]
    return {
        word: sum(len(a) > i and a[i].rstrip("es") == b[i].rstrip("es") for a, b in pairs) / len(pairs)
        for i, word in enumerate(WORDS)
    }


def gallery(samples: Sequence[Sample], said: Sequence[str] = ()) -> Any:
    """Samples as HTML: the pictures, the sound drawn, the truth, and what a model said."""
    from IPython.display import HTML

    cards = []
    for i, one in enumerate(samples):
        sounds = getattr(one, "sounds", ())
        text = one.text.replace(IMAGE, "").replace(END_OF_CHUNK, " |")
        pictures = "".join(_png(image, f"the picture to: {text}") for image in one.images)
        shown = pictures + "".join(_wave(wave, f"the sound to: {text}") for wave in sounds)
        words = f"{escape(text)}{f'<br><b>said:</b> {escape(said[i])}' if said else ''}"
        wide = 104 * (3 if len(one.images) % 2 and not sounds and len(one.images) > 1 else 2)
        cards.append(f"<div style='width:{wide}px'>{shown}<div>{words}</div></div>")
    return HTML(f"<div style='display:flex;flex-wrap:wrap;gap:16px'>{''.join(cards)}</div>")


def _png(image: Any, alt: str) -> str:
    held = BytesIO()
    image.resize((96, 96), 0).save(held, "PNG")
    source = f"data:image/png;base64,{b64encode(held.getvalue()).decode()}"
    return f"<img src='{source}' alt='{escape(alt)}' width='96' height='96'> "


def _wave(wave: np.ndarray, alt: str) -> str:
    points = [(i * 96 / len(wave), 48 - 80 * float(wave[i])) for i in range(0, len(wave), 4)]
    return svg(96, 96, alt, path(points, FROZEN, width=0.7))
