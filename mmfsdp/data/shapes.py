"""ShapesSource: endless pictures of colored shapes, each with its caption or with a question and its answer."""

from __future__ import annotations

import random

from ..params import DataParams, Task
from .batch import Sample
from .processor import IMAGE
from .render import render
from .scenes import Scene, caption, combinations, draw_scene, questions, split_combinations

HELDOUT, UNSEEN, TRAIN = "heldout", "unseen", "train"


class ShapesSource:
    """Generated samples by index, the same for the same arguments.

    `train` and `heldout` draw pictures of the seen combinations, never the same ones; every picture of `unseen` holds
    a combination that neither of them ever draws. Size is in pixels and changes nothing else about a picture.
    """

    def __init__(self, params: DataParams, *, split: str = TRAIN, image_size: int, seed: int = 0):
        assert split in (TRAIN, HELDOUT, UNSEEN), split
        self.params, self.split, self.image_size, self.seed = params, split, image_size, seed
        self.seen, self.unseen = split_combinations(params.unseen_fraction)

    def scene(self, index: int) -> tuple[Scene, random.Random]:
        """What picture `index` shows, and the random state that goes on from there."""
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        shown, pair = self.unseen if self.split == UNSEEN else self.seen, rng.random() < self.params.pair_fraction
        return draw_scene(rng, shown, pair=pair, partners=self.seen), rng

    def sample(self, index: int) -> Sample:
        """Sample `index`: the picture with its caption, or with one of its questions."""
        scene, rng = self.scene(index)
        image = render(scene, self.image_size)
        name = f"{self.split}/{index}"
        if self.params.task is Task.CAPTION:
            return Sample(IMAGE, caption(scene), (image,), name)
        question, answer = rng.choice(questions(scene))
        return Sample(f"{IMAGE} {question}", answer, (image,), name)


def some_text(rng: random.Random) -> str:
    """A caption of any combination or pair of them, mostly followed by questions that it answers.

    To answer from what was said before, a language model must tell every word from every other: one that has read
    captions alone gives all colors, say, one meaning, and no picture could make it choose among them.
    """
    scene = draw_scene(rng, combinations(), pair=rng.random() < 0.2)
    said = caption(scene)
    asked = [("what is there ?", said), *questions(scene)] if rng.random() < 0.8 else []
    return " ".join([said, *(f"{question} {answer}" for question, answer in rng.sample(asked, min(3, len(asked))))])


def every_word() -> list[str]:
    """All words of all texts, in a fixed order."""
    rng = random.Random(0)
    return sorted({word for _ in range(5000) for word in some_text(rng).split()})
