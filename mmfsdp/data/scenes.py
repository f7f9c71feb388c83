"""Scenes of colored shapes: what is in a picture, what is said about it, and which combinations are never shown.

Lengths are shares of the picture's side, so that one scene can be drawn at any size. Nothing here draws.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache

from ..params.data import MOST_UNSEEN

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
SHAPES = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "star": "stars",
    "cross": "crosses",
    "heart": "hearts",
}
RELATIONS = ("above", "left of")
"""One per axis, first group first, so that a picture has exactly one caption."""

_SPLIT_SEED = 20240229
_MARGIN = 0.02
_MOST_IN_PAIR = 2
"""Shapes in each group of a picture with two groups; more would not fit in half of it."""


@dataclass(frozen=True, order=True)
class Combination:
    """What a group of equal shapes is: one value of each attribute."""

    count: int
    size: str
    color: str
    shape: str

    def __str__(self) -> str:
        noun = self.shape if self.count == 1 else SHAPES[self.shape]
        return f"{COUNTS[self.count - 1]} {self.size} {self.color} {noun}"


@dataclass(frozen=True)
class Place:
    """Where one shape is: center and radius in shares of the side, clockwise turn in radians."""

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
    """The one caption of a scene: 'two small red circles above one large blue square'."""
    return f" {scene.relation} ".join(str(group.combination) for group in scene.groups)


def questions(scene: Scene) -> list[tuple[str, str]]:
    """Questions about a scene, each with its one right answer."""
    if scene.relation is None:
        (group,) = scene.groups
        it = group.combination
        return [
            ("how many shapes are there ?", COUNTS[it.count - 1]),
            ("what color are they ?", it.color),
            ("what shape are they ?", it.shape),
            ("are they small or large ?", it.size),
        ]
    one, other = (group.combination for group in scene.groups)
    asked = [(f"what is {scene.relation} the {other.color} shapes ?", str(one))]
    for it in (one, other):  # the colors of two groups differ
        asked += [(f"how many {it.color} shapes are there ?", COUNTS[it.count - 1])]
        asked += [(f"what shape are the {it.color} shapes ?", it.shape)]
    return asked


@cache
def combinations() -> tuple[Combination, ...]:
    """Every combination of attributes."""
    product = itertools.product(range(1, len(COUNTS) + 1), SIZES, COLORS, SHAPES)
    return tuple(Combination(*values) for values in product)


@cache
def split_combinations(
    unseen_fraction: float = MOST_UNSEEN,
) -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """(seen, unseen) combinations, the same in every run. What is unseen at a lower fraction is so at a higher one:
    pretraining leaves out all that any training may call unseen."""
    everything = list(combinations())
    random.Random(_SPLIT_SEED).shuffle(everything)
    cut = max(1, round(len(everything) * unseen_fraction))
    return tuple(sorted(everything[cut:])), tuple(sorted(everything[:cut]))


def draw_scene(
    rng: random.Random,
    choices: tuple[Combination, ...],
    *,
    pair: bool = False,
    partners: tuple[Combination, ...] | None = None,
) -> Scene:
    """A random scene of one of `choices`; with `pair`, beside one of `partners` (default: choices) of another color."""
    corners = tuple(_near(rng, (236, 236, 236), 14) for _ in range(4))
    if not pair:
        return Scene((_group(rng, rng.choice(choices), (0.0, 0.0, 1.0, 1.0)),), None, corners)
    relation = rng.choice(RELATIONS)
    one = rng.choice([c for c in choices if c.count <= _MOST_IN_PAIR])
    other = rng.choice([c for c in partners or choices if c.count <= _MOST_IN_PAIR and c.color != one.color])
    ordered = rng.sample([one, other], 2)
    boxes = ((0.0, 0.0, 1.0, 0.5), (0.0, 0.5, 1.0, 1.0))
    if relation == "left of":
        boxes = ((0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0))
    while True:
        groups = tuple(_group(rng, c, box) for c, box in zip(ordered, boxes, strict=True))
        if _clear(groups, relation):
            return Scene(groups, relation, corners)


def _group(rng: random.Random, combination: Combination, box: tuple[float, float, float, float]) -> Group:
    tint = _near(rng, COLORS[combination.color], 10)
    while True:
        places = _places(rng, combination, box)
        if places:
            return Group(combination, places, tint)


def _places(rng: random.Random, combination: Combination, box: tuple[float, float, float, float]) -> tuple[Place, ...]:
    """Places that keep clear of each other and of the box, or none if this try found no room."""
    places: list[Place] = []
    radius = SIZES[combination.size] * rng.uniform(0.92, 1.08)
    reach = radius + _MARGIN
    for _ in range(combination.count):
        for _ in range(20):
            x, y = rng.uniform(box[0] + reach, box[2] - reach), rng.uniform(box[1] + reach, box[3] - reach)
            if all(math.dist((x, y), (p.x, p.y)) > 2 * radius + _MARGIN for p in places):
                places.append(Place(x, y, radius, rng.uniform(-0.25, 0.25)))
                break
        else:
            return ()
    return tuple(places)


def _clear(groups: tuple[Group, ...], relation: str) -> bool:
    """The two groups lie along one axis, not diagonally."""
    (ax, ay), (bx, by) = (_center(g) for g in groups)
    along, across = (by - ay, bx - ax) if relation == "above" else (bx - ax, by - ay)
    return along > 2 * abs(across)


def _center(group: Group) -> tuple[float, float]:
    n = len(group.places)
    return sum(p.x for p in group.places) / n, sum(p.y for p in group.places) / n


def _near(rng: random.Random, color: tuple[int, int, int], by: int) -> tuple[int, int, int]:
    r, g, b = (min(255, max(0, c + rng.randint(-by, by))) for c in color)
    return r, g, b
