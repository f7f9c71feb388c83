"""Few of many cases in which each choice, or each pair of choices, still occurs: the rest is for `make test-all`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


def cover(cases: Mapping[Name, Iterable[Any]]) -> list[Name]:
    """Return the names of few cases in which everything occurs that occurs in any.

    Args:
        cases: what occurs in each case, by its name: choices, or pairs of them (`pairs`); hashable.

    The next case is the one that shows most that none before it has shown (the first of several), the greedy algorithm
    for a set cover, so it may take a few more than the least number.
    """
    occurring = {name: set(facts) for name, facts in cases.items()}
    missing = set().union(*occurring.values())
    chosen = []
    while missing:
        best = max(occurring, key=lambda name: len(occurring[name] & missing))
        missing -= occurring.pop(best)
        chosen.append(best)
    return [name for name in cases if name in chosen]


def pairs(choices: Mapping[str, Any]) -> set[tuple]:
    """Return each pair of choices of a case, as ((field, value), (field, value))."""
    texts = [(field, str(value)) for field, value in choices.items()]
    return set(combinations(sorted(texts), 2))


def kept(cases: Mapping[Name, Iterable[Any]]) -> list[Any]:
    """Return the names of all cases as parameters of a test; those outside of the cover are marked `extended`."""
    import pytest  # benches use the rest of this module, where pytest may not be installed

    chosen = cover(cases)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.extended) for name in cases]


def selected(request: Any, parameter: str) -> list[Any]:
    """Return the values of a parameter in the collected tests that use this fixture: those that it has to work out."""
    values = []
    for item in request.session.items:
        if item.path == request.path and request.fixturename in item.fixturenames and hasattr(item, "callspec"):
            values.append(item.callspec.params[parameter])
    return list(dict.fromkeys(values))
