"""The source `shapes`: samples by index, each a generated picture with its caption."""

from __future__ import annotations

import random

from ...params import DataParams
from ..data.batch import Sample
from ..data.processor import IMAGE
from ..data.sources.stream import IndexedSource, Source
from .drawing import render
from .scenes import Scene, caption, draw_scene, split_combinations


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
        return Sample.of(IMAGE, caption(scene), (render(scene, self.image_size),), f"{self.split}/{index}")
