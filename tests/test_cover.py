"""In the cases that are kept for `make test` everything occurs that occurs in all of them."""

import pytest

from tests.cover import cover, kept, pairs
from tests.ranks import WAYS, choices_of


@pytest.mark.parametrize("name", WAYS)
def test_each_choice_of_the_ways_to_wrap_occurs_in_those_that_are_kept(name):
    choices = choices_of(WAYS[name])
    chosen = cover(choices)
    assert set().union(*(choices[way] for way in chosen)) == set().union(*choices.values())
    assert len(chosen) < len(choices) and chosen == [way for way in choices if way in chosen]


def test_pairs_of_two_choices_take_all_cases_and_single_ones_fewer():
    cases = {f"{a}{b}": {"a": a, "b": b} for a in range(3) for b in range(2)}
    assert cover({name: pairs(case) for name, case in cases.items()}) == list(cases)
    assert cover({name: case.items() for name, case in cases.items()}) == ["00", "11", "20"]


def test_those_outside_of_the_cover_are_marked():
    first, second = kept({"both": {1, 2}, "one": {1}})
    assert first == "both" and second.values == ("one",) and second.marks[0].name == "extended"
