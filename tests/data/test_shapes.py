"""Generated pictures: the same for the same index, split by combination, and no room for doubt about the caption."""

import math
import random
from itertools import combinations as pairs_of

import numpy as np
import pytest

from mmfsdp.kit.data import IMAGE
from mmfsdp.kit.shapes.drawing import render
from mmfsdp.kit.shapes.scenes import (
    COUNTS,
    RELATIONS,
    SIZES,
    Combination,
    caption,
    combinations,
    draw_scene,
    split_combinations,
)
from mmfsdp.kit.shapes.shapes_source import ShapesSource
from mmfsdp.kit.shapes.texts import every_word, some_text
from mmfsdp.params import DataParams

PARAMS = DataParams(pair_fraction=0.5)


def scenes(split, n=200, seed=0):
    source = ShapesSource(PARAMS, split=split, image_size=48, seed=seed)
    return [source.scene(i) for i in range(n)]


def in_scene(scene):
    return {group.combination for group in scene.groups}


def test_a_sample_is_the_same_in_every_process_and_at_every_size():
    def sample(size, seed=0):
        return ShapesSource(PARAMS, split="train", image_size=size, seed=seed).sample(7)

    assert sample(48).images[0].tobytes() == sample(48).images[0].tobytes() != sample(48, seed=1).images[0].tobytes()
    assert sample(48).text == sample(192).text and sample(48).prompt == IMAGE
    small, large = (np.asarray(s.images[0].resize((48, 48)), float) for s in (sample(48), sample(192)))
    assert np.abs(small - large).mean() < 4


def test_no_training_picture_shows_an_unseen_combination_and_every_unseen_picture_does():
    seen, unseen = (set(part) for part in split_combinations())
    assert not seen & unseen and seen | unseen == set(combinations()) and len(unseen) == round(0.15 * 384)
    for split in ("train", "heldout"):
        assert all(in_scene(scene) <= seen for scene in scenes(split))
    assert all(in_scene(scene) & unseen for scene in scenes("unseen"))
    assert not set(scenes("train")) & set(scenes("heldout"))


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_shapes_keep_apart_and_within_the_picture(split):
    for scene in scenes(split):
        places = [place for group in scene.groups for place in group.places]
        assert all(p.radius <= min(p.x, p.y, 1 - p.x, 1 - p.y) for p in places)
        assert all(math.dist((p.x, p.y), (q.x, q.y)) > p.radius + q.radius for p, q in pairs_of(places, 2))
        for group in scene.groups:
            assert len(group.places) == group.combination.count
            assert all(abs(p.radius / SIZES[group.combination.size] - 1) < 0.1 for p in group.places)
    assert SIZES["large"] * 0.9 > SIZES["small"] * 1.1 * 1.3


def read(text: str) -> list[Combination]:
    """What a caption says."""
    for relation in RELATIONS:
        text = text.replace(f" {relation} ", "|")
    found = []
    for part in text.split("|"):
        count, size, color, noun = part.split()
        found += [c for c in combinations() if str(c) == part and (c.size, c.color) == (size, color)]
        assert found[-1].count == COUNTS.index(count) + 1 and noun.startswith(found[-1].shape)
    return found


def test_a_caption_says_what_is_there_and_where():
    relations = set()
    for scene in scenes("train"):
        assert read(caption(scene)) == [group.combination for group in scene.groups]
        relations.add(scene.relation)
        if scene.relation:
            one, other = ([(p.x, p.y)[scene.relation == "above"] for p in g.places] for g in scene.groups)
            assert max(one) < min(other)
            assert len({group.combination.color for group in scene.groups}) == 2
    assert relations == {None, *RELATIONS}


def test_the_picture_shows_the_color_that_the_caption_names():
    scene = draw_scene(random.Random(0), (Combination(1, "large", "blue", "circle"),))
    (group,) = scene.groups
    (place,) = group.places
    picture = np.asarray(render(scene, 96))
    assert tuple(picture[int(place.y * 96), int(place.x * 96)]) == group.tint
    assert (picture[2, 2] > 200).all() and picture.shape == (96, 96, 3)


def test_the_vocabulary_holds_every_word():
    rng = random.Random(123)
    assert {word for _ in range(3000) for word in some_text(rng).split()} <= set(every_word())
