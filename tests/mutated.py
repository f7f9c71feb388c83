"""Values of JSON that somebody has damaged: for readers of files that come from elsewhere."""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

ODD = (
    *("\x1b]0;title\x07<img src=x onerror=alert(1)>", "", "\ud800", "../../x", "a\nb", "x" * 5000),
    *(0, -1, 1, True, False, 10**18, 10**299, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(None, [], {}, [None], [1, 2], [[[]]], {"a": 1}, {"<img src=x>": "<img src=x>"}),
)
"""Values of which any may stand in any place."""
MOST_ITEMS = 6
"""Items of a list that are changed; further ones are like them."""


def _places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """The keys and indexes that lead to each part of a value, outermost first."""
    if place:
        yield place
    items: list = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:MOST_ITEMS]))
    for key, item in items:
        yield from _places(item, (*place, key))


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of a value in which one to three parts are other ones, are gone, are there twice or have another name."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        *above, key = rng.choice(places)
        parent = value
        for step in above:
            parent = parent[step]
        how = rng.random()
        if how < 0.75:
            parent[key] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.9:
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[rng.choice(("new", "", ODD[0]))] = parent.pop(key)
    return value


def cases(value: Any, count: int, seed: int = 1) -> Iterator[Any]:
    """So many mutated copies of a value, the same ones each time."""
    rng = random.Random(seed)
    for _ in range(count):
        yield mutated(value, rng)
