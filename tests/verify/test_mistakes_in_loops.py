"""`verify` finds each planted mistake of tests/files/own/mistakes.py by one line, and none in the right loops."""

import sys
from pathlib import Path

import pytest

from mmfsdp import verify
from mmfsdp.kit.data.own_random import seed_all
from mmfsdp.kit.verify.lines import Line, from_plain
from tests.cover import selected
from tests.ranks import on_ranks

OWN = Path(__file__).resolve().parents[1] / "files/own"
sys.path.insert(0, str(OWN))
try:
    from mistakes import NAMED, NOTES, OTHERS, RIGHT
finally:
    sys.path.remove(str(OWN))
CASES = NAMED | OTHERS


def lines_of_all(names: list[str]) -> dict[str, list[dict]]:
    """Verify the loops of some names, as one rank."""
    sys.path.insert(0, str(OWN))
    import mistakes
    import torch.distributed as dist

    loops = {name: case[0] for name, case in (mistakes.NAMED | mistakes.OTHERS).items()} | mistakes.RIGHT
    lines = {}
    for name in names:
        seed_all(1000 + dist.get_rank())  # as ranks that nobody has seeded
        loop = loops[name]()
        lines[name] = [vars(line) for line in verify(loop.build, **loop.arguments()).lines]
    return lines


@pytest.fixture(scope="module")
def lines(request):
    """The lines of each selected loop, by name: one start of two ranks for all."""
    results = on_ranks(lines_of_all, 2, selected(request, "name"), timeout_s=60)[0]
    return {name: from_plain(values) for name, values in results.items()}


def wrong(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.level == "wrong"]


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_found_by_a_line_of_its_own(lines, name):
    _, check, words = CASES[name]
    assert [line.code for line in wrong(lines[name])] == [check], "\n".join(map(str, lines[name]))
    [line] = wrong(lines[name])
    assert words in line.message
    assert line.fix, "it says what to do"


@pytest.mark.real
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_right_loop(lines, name):
    assert not wrong(lines[name]), "\n".join(map(str, lines[name]))


@pytest.mark.real
@pytest.mark.parametrize("name", NOTES)
def test_what_is_no_mistake_is_told_in_a_note(lines, name):
    check, words = NOTES[name]
    [line] = [line for line in lines[name] if line.code == check]
    assert line.level == "note" and words in line.message
