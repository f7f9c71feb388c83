"""Guess first: the costs of the ways come after the guess, and beside it; without one, too."""

import pytest
from course.checks import verdict
from course.guess import ASKED, POLICIES, UNITS, bytes_of, guess_first

from mmfsdp.kit.train.ways import ways
from mmfsdp.params import load
from mmfsdp.params.in_words import size


def test_what_each_way_costs_is_shown_after_a_guess_and_without_one():
    costs = {way.name: way for way in ways(load("tiny"))}
    most = max(POLICIES, key=lambda policy: costs[POLICIES[policy]].sent_bytes)
    least = min(POLICIES, key=lambda policy: costs[POLICIES[policy]].sent_bytes)
    asked = guess_first("tiny")
    assert asked.answer.value == "", "nothing is shown before"
    asked.look()
    asked.wait_for_work()
    without = asked.answer.value
    for name in POLICIES.values():
        for nbytes in (costs[name].sent_bytes, costs[name].at_rest_bytes, costs[name].peak_bytes):
            assert f"<span>{size(nbytes)}</span>" in without
    assert f"<b>{most} sends most" in without and "your guess" not in without
    held = costs[POLICIES[str(ASKED)]].at_rest_bytes
    asked.way.value, asked.size.value = least, f"{2 * held / UNITS['MiB']:.6f}"
    asked.look()
    asked.wait_for_work()
    assert f"You said {least}: {most} sends most" in asked.answer.value
    assert f"you said {size(2 * held)}: {verdict(2 * held, held)}" in asked.answer.value
    assert f"{least}<small>your guess" in asked.answer.value
    asked.way.value, asked.size.value = most, "<b>"
    asked.look()
    assert "&lt;b&gt;" in asked.error_line.value and "Right" not in asked.answer.value
    asked.close()


@pytest.mark.parametrize(("words", "number"), [("", None), (" ", None), ("2.5", 2.5), ("2,5 MiB", 2.5), ("0", 0)])
def test_a_number_of_bytes_is_read_or_left_out(words, number):
    assert bytes_of(words, "MiB") == (None if number is None else number * UNITS["MiB"])


@pytest.mark.parametrize("words", ["many", "-1", "nan", "inf", "1e999"])
def test_what_is_no_number_of_bytes_is_told(words):
    with pytest.raises(ValueError, match="is not a number of GiB"):
        bytes_of(words, "GiB")
