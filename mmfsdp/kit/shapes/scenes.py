"""Scenes of colored shapes: the content of a picture, its caption and questions, and the combinations never shown.

Lengths are shares of the picture's side, so that one scene can be drawn at any size. drawing.py draws them.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache

COUNTS = ("one", "two", "three", "four")
SIZES = {"small": 0.1, "large": 0.165}
"""Radius of the circle around a shape. The jitter of 8 % leaves a wide gap between the two."""
# Okabe and Ito's palette, which people with color blindness can tell apart, slightly deepened for light backgrounds.
COLORS = {
    "red": (204, 51, 17),
    "orange": (238, 150, 20),
    "yellow": (240, 222, 40),
    "green": (0, 140, 100),
    "cyan": (90, 185, 235),
    "blue": (0, 85, 170),
    "pink": (220, 110, 175),
    "black": (35, 35, 40),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
RELATIONS = ("above", "left of")
"""One per axis, first group first, so that a picture has exactly one caption."""

SPLIT_SEED = 20240229
UNSEEN_FRACTION = 0.15
"""Share of combinations that no pretraining and no training ever shows in a picture."""
MARGIN = 0.02
MAX_IN_PAIR = 2
"""Shapes in each group of a picture with two groups; more would not fit in half of it."""


@dataclass(frozen=True, order=True)
class Combination:
    """The attributes of a group of equal shapes."""

    count: int
    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        noun = self.shape
        if self.count > 1:
            noun += "es" if noun == "cross" else "s"
        return f"{COUNTS[self.count - 1]} {self.size} {self.color} {noun}"


@dataclass(frozen=True)
class Place:
    """The place of one shape: center and radius in shares of the side, clockwise turn in radians."""

    x: float
    y: float
    radius: float
    turn: float


@dataclass(frozen=True)
class Group:
    """Equal shapes and their places."""

    combination: Combination
    places: tuple[Place, ...]
    tint: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """One picture: a group, or two with the relation between them, on a soft background (RGB of its corners)."""

    groups: tuple[Group, ...]
    relation: str | None
    corners: tuple[tuple[int, int, int], ...]


def caption(scene: Scene) -> str:
    """Return the one caption of a scene: 'two small red circles above one large blue square'."""
    return f" {scene.relation} ".join(str(group.combination) for group in scene.groups)


def questions(scene: Scene) -> list[tuple[str, str]]:
    """Return questions about a scene, each with its one right answer."""
    if scene.relation is None:
        shapes = scene.groups[0].combination
        return [
            ("how many shapes are there ?", COUNTS[shapes.count - 1]),
            ("what color are they ?", shapes.color),
            ("what shape are they ?", shapes.shape),
            ("are they small or large ?", shapes.size),
        ]
    first, second = scene.groups[0].combination, scene.groups[1].combination
    pairs = [(f"what is {scene.relation} the {second.color} shapes ?", str(first))]
    for shapes in (first, second):  # the colors of two groups differ
        pairs.append((f"how many {shapes.color} shapes are there ?", COUNTS[shapes.count - 1]))
        pairs.append((f"what shape are the {shapes.color} shapes ?", shapes.shape))
    return pairs


@cache
def combinations() -> tuple[Combination, ...]:
    """Return every combination of attributes."""
    product = itertools.product(range(1, len(COUNTS) + 1), SIZES, COLORS, SHAPES)
    return tuple(Combination(*values) for values in product)


@cache
def split_combinations() -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """Return (seen, unseen) combinations, the same in every run."""
    shuffled = list(combinations())
    random.Random(SPLIT_SEED).shuffle(shuffled)
    cut = round(len(shuffled) * UNSEEN_FRACTION)
    return tuple(sorted(shuffled[cut:])), tuple(sorted(shuffled[:cut]))


def draw_scene(
    rng: random.Random,
    choices: tuple[Combination, ...],
    *,
    pair: bool = False,
    partners: tuple[Combination, ...] | None = None,
) -> Scene:
    """Return a random scene of one of `choices`; with `pair`, also of one of `partners` (default: choices)."""
    corners = tuple(_near(rng, (236, 236, 236), 14) for _ in range(4))
    if not pair:
        return Scene((_group(rng, rng.choice(choices), (0.0, 0.0, 1.0, 1.0)),), None, corners)
    relation = rng.choice(RELATIONS)
    first = rng.choice([c for c in choices if c.count <= MAX_IN_PAIR])
    second = rng.choice([c for c in partners or choices if c.count <= MAX_IN_PAIR and c.color != first.color])
    ordered = rng.sample([first, second], 2)
    boxes = ((0.0, 0.0, 1.0, 0.5), (0.0, 0.5, 1.0, 1.0))
    if relation == "left of":
        boxes = ((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0))
    while True:
        groups = tuple(_group(rng, c, box) for c, box in zip(ordered, boxes, strict=True))
        if _is_aligned(groups, relation):
            return Scene(groups, relation, corners)


def _group(rng: random.Random, combination: Combination, box: tuple[float, float, float, float]) -> Group:
    tint = _near(rng, COLORS[combination.color], 10)
    while True:
        places = _places(rng, combination, box)
        if places:
            return Group(combination, places, tint)


def _places(rng: random.Random, combination: Combination, box: tuple[float, float, float, float]) -> tuple[Place, ...]:
    """Return places with a margin between them and to the box's edge, or none if this try found no room."""
    places: list[Place] = []
    radius = SIZES[combination.size] * rng.uniform(0.92, 1.08)
    reach = radius + MARGIN
    for _ in range(combination.count):
        for _ in range(20):
            x, y = rng.uniform(box[0] + reach, box[2] - reach), rng.uniform(box[1] + reach, box[3] - reach)
            if all(math.dist((x, y), (p.x, p.y)) > 2 * radius + MARGIN for p in places):
                places.append(Place(x, y, radius, rng.uniform(-0.25, 0.25)))
                break
        else:
            return ()
    return tuple(places)


def _is_aligned(groups: tuple[Group, ...], relation: str) -> bool:
    """Return whether the two groups lie along one axis, not diagonally."""
    first, second = _center(groups[0]), _center(groups[1])
    right, down = second[0] - first[0], second[1] - first[1]
    if relation == "above":
        return down > 2 * abs(right)
    return right > 2 * abs(down)


def _center(group: Group) -> tuple[float, float]:
    n = len(group.places)
    return sum(p.x for p in group.places) / n, sum(p.y for p in group.places) / n


def _near(rng: random.Random, color: tuple[int, int, int], spread: int) -> tuple[int, int, int]:
    """Return a color whose channels differ by at most `spread`."""
    r, g, b = [min(255, max(0, channel + rng.randint(-spread, spread))) for channel in color]
    return r, g, b
