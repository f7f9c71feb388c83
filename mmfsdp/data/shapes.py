"""Generated pictures of colored shapes: their drawing, samples by index, texts without pictures, and the tokenizer."""

from __future__ import annotations

import math
import random
from functools import cache

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ..params import DataParams
from .batch import Sample
from .processor import IMAGE
from .scenes import Group, Scene, caption, combinations, draw_scene, questions, split_combinations
from .stream import IndexedSource, Source

OVERSAMPLING = 4
RIM_START = 0.86
"""The inside of a shape, as a share of its radius; the darker rim is around it."""
RIM_BRIGHTNESS = 0.72
Corner = tuple[float, float]


def open_shapes(params: DataParams, *, image_size: int, seed: int) -> dict[str, Source]:
    """Return the splits of generated pictures, each without end."""
    splits: dict[str, Source] = {}
    for split in ("train", "heldout", "unseen"):
        splits[split] = IndexedSource(ShapesSource(params, split=split, image_size=image_size, seed=seed).sample)
    return splits


class ShapesSource:
    """Generated samples by index, the same for the same arguments.

    `train` and `heldout` draw pictures of the seen combinations, never the same ones; every picture of `unseen` has a
    combination that neither of them ever draws. The size in pixels changes nothing else about a picture.
    """

    def __init__(self, params: DataParams, *, split: str = "train", image_size: int, seed: int = 0):
        self.params, self.split, self.image_size, self.seed = params, split, image_size, seed
        self.seen, self.unseen = split_combinations()

    def scene(self, index: int) -> Scene:
        """Return the scene of picture `index`."""
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        choices = self.unseen if self.split == "unseen" else self.seen
        pair = rng.random() < self.params.pair_fraction
        return draw_scene(rng, choices, pair=pair, partners=self.seen)

    def sample(self, index: int) -> Sample:
        """Return sample `index`: the picture with its caption."""
        scene = self.scene(index)
        return Sample(IMAGE, caption(scene), (render(scene, self.image_size),), f"{self.split}/{index}")


def render(scene: Scene, size: int) -> Image.Image:
    """Return the picture of a scene, RGB, `size` x `size` pixels. The same scene always gives the same pixels."""
    corners = Image.new("RGB", (2, 2))
    corners.putdata(scene.corners)
    picture = corners.resize((size, size), Image.Resampling.BILINEAR)
    for group in scene.groups:
        rim = tuple(int(RIM_BRIGHTNESS * c) for c in group.tint)
        picture.paste(rim, mask=_mask(group, size, 1.0))
        picture.paste(group.tint, mask=_mask(group, size, RIM_START))
    return picture


def _mask(group: Group, size: int, scale: float) -> Image.Image:
    """Return the anti-aliased area of a group's shapes, shrunk to `scale`: 0 to 255, mode L, `size` x `size`."""
    side = size * OVERSAMPLING
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    outline = _outline(group.combination.shape)
    for place in group.places:
        cos = math.cos(place.turn) * place.radius * scale * side
        sin = math.sin(place.turn) * place.radius * scale * side
        x, y = place.x * side, place.y * side
        draw.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in outline], fill=255)
    return mask.reduce(OVERSAMPLING)


@cache
def _outline(shape: str) -> tuple[Corner, ...]:
    """Return the corners of a shape within the unit circle, y pointing down."""
    if shape == "circle":
        return _polygon(48, 0.95)
    if shape == "square":
        return _polygon(4, 1.0, turn=math.pi / 4)
    if shape == "triangle":
        return _polygon(3, 1.0)
    corners: list[Corner] = []
    if shape == "star":
        for outer, inner in zip(_polygon(5, 1.0), _polygon(5, 0.45, turn=math.pi / 5), strict=True):
            corners += [outer, inner]
    elif shape == "cross":
        for cos, sin in ((1, 0), (0, 1), (-1, 0), (0, -1)):  # four quarter turns of one arm
            for x, y in ((-0.3, -0.95), (0.3, -0.95), (0.3, -0.3)):
                corners.append((x * cos - y * sin, x * sin + y * cos))
    else:
        assert shape == "heart", shape
        for i in range(48):  # the heart curve, mathworld.wolfram.com/HeartCurve.html
            t = 2 * math.pi * i / 48
            x = 16 * math.sin(t) ** 3
            y = -13 * math.cos(t) + 5 * math.cos(2 * t) + 2 * math.cos(3 * t) + math.cos(4 * t)
            corners.append((x / 17, (y - 2.5) / 17))
    return tuple(corners)


def _polygon(corners: int, radius: float, turn: float = 0.0) -> tuple[Corner, ...]:
    """Return a regular polygon's corners."""
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    return tuple((radius * math.sin(a), -radius * math.cos(a)) for a in angles)


def some_text(rng: random.Random) -> str:
    """Return a caption of any combination or pair of them, mostly followed by questions and their answers.

    To answer from the text before, a language model must tell every word from every other. One that has read captions
    alone could give all colors one meaning, and no picture could make it choose among them.
    """
    scene = draw_scene(rng, combinations(), pair=rng.random() < 0.2)
    parts = [caption(scene)]
    if rng.random() < 0.8:
        pairs = [("what is there ?", parts[0]), *questions(scene)]
    else:
        pairs = []
    for question, answer in rng.sample(pairs, min(3, len(pairs))):
        parts.append(f"{question} {answer}")
    return " ".join(parts)


def every_word() -> list[str]:
    """Return all words of all texts, in a fixed order."""
    rng = random.Random(0)
    words: set[str] = set()
    for _ in range(5000):
        words.update(some_text(rng).split())
    return sorted(words)


def word_tokenizer(*, close: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per word, with a begin token first and, with `close`, an end token last.

    The end token has the highest id, which is how CLIP's text tower finds it.
    """
    words = ["<pad>", "<unk>", "<s>", *every_word(), "</s>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if close else "<s> $A", special_tokens=[(t, vocabulary[t]) for t in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
