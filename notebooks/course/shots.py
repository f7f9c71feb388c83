"""`python -m course.shots`, in notebooks/: how a Flamingo learns from examples in its prompt.

Documents of four pictures train it: in one document the word after each picture is its color, in another its shape.
Only the words so far tell which.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mmfsdp import build_model, freeze
from mmfsdp.kit.data.batch import Sample
from mmfsdp.kit.data.processor import END_OF_CHUNK, IMAGE
from mmfsdp.kit.shapes.drawing import render
from mmfsdp.kit.shapes.scenes import Combination, draw_scene, split_combinations

from .senses import Seen, fit, pretrained

STYLES: dict[str, Callable[[Combination], str]] = {
    "color": lambda it: it.color,
    "shape": lambda it: str(replace(it, count=2)).split()[-1],  # in the plural
}


def document(index: int, *, pictures: int = 4, style: str = "", split: str = "train") -> Sample:
    """Pictures, each followed by a word about it: in one document always its color, in another always its shape."""
    rng = random.Random(f"document/{split}/{index}")
    style = style or rng.choice(list(STYLES))
    scenes = [draw_scene(rng, split_combinations()[0]) for _ in range(pictures)]
    said = f"{END_OF_CHUNK}".join(f"{IMAGE} {STYLES[style](s.groups[0].combination)}" for s in scenes)
    images = tuple(render(scene, 48) for scene in scenes)
    return Sample.of(IMAGE, said.removeprefix(IMAGE).strip(), images, f"{style}/{split}/{index}")


@torch.no_grad()
def right_by_shots(model: Any, processor: Any, seen: Seen) -> list[float]:
    """Share of documents whose word after picture i is right, given the i pictures and words before it."""
    logits = model(**seen.batch.inputs()).logits.argmax(-1)
    ids = seen.batch.input_ids
    places = (ids == processor.image_id).nonzero()[:, 1].unflatten(0, (len(ids), -1))
    right = logits.gather(1, places) == ids.gather(1, places + 1)
    return right.float().mean(0).tolist()


def main() -> None:
    """Train for 200 steps; print which share of the words is right, by the number of examples before them."""
    torch.manual_seed(0)
    model, processor = build_model(pretrained().model)
    freeze(model, ["flamingo"])
    fit(model, Seen.by(model, processor, [document(i) for i in range(320)]), steps=200, lr=3e-3)
    new = Seen.by(model, processor, [document(i, split="held") for i in range(64)])
    for examples, share in enumerate(right_by_shots(model, processor, new)):
        print(f"{examples} examples: {share:.0%} right")


if __name__ == "__main__":
    main()
