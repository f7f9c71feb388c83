"""The file that students build in lessons 02, 03 and 05: its parts, %catch_up, and the finished one."""

import json

import fsdp_in_200_lines
import pytest
import torch.distributed as dist
from books import FOLDER
from course import checks
from course import file_parts as files
from course.grades import graded
from course.proof import peak
from course.toys import texts, toy_lm
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.density import measure

WHOLE = FOLDER / "fsdp_in_200_lines.py"


def test_the_finished_file_is_what_the_solutions_write():
    assert WHOLE.read_text(encoding="utf-8") == "\n\n\n".join(files.parts_after(6).values()) + "\n"
    assert measure(WHOLE).code <= 200


def test_each_step_leaves_a_file_without_blanks_that_grows():
    names: list[str] = []
    for step in range(1, 8):
        parts = files.parts_after(step)
        assert list(parts)[: len(names)] == names, "a part stays where it is"
        assert not [name for name, code in parts.items() if files.blanks(code)]
        names = list(parts)
    assert {part.step for part in files.lesson_parts()} == set(range(1, 8))


def test_catching_up_keeps_the_file_that_was_there(capsys):
    files.part("1 shard_of", "def shard_of(tensor):\n    return tensor\n")
    files.go_on_from("2")
    assert "Not written yet: imports" in capsys.readouterr().out
    assert files.own_parts() == files.parts_after(2)
    assert "return tensor" in files.own_file().with_name("my_fsdp_before.py").read_text()
    files.part("2 mine", "x = 1")
    files.go_on_from("2")
    assert "x = 1" in files.own_file().read_text(), "a file that has all parts stays"
    files.part("2 refill", "def fill(piece, parts):\n    ...")
    files.go_on_from("2")
    assert "Not written yet: refill" in capsys.readouterr().out


def test_one_part_is_given_and_the_others_stay(capsys):
    files.part("1 shard_of", "def shard_of(tensor):\n    return tensor\n")
    files.part("3 collectives", "def gather(unit):\n    ...")
    files.catch_up("3 collectives")
    assert files.own_parts() == {
        "shard_of": "def shard_of(tensor):\n    return tensor",
        "collectives": files.parts_after(3)["collectives"],
    }
    with pytest.raises(ValueError, match="step 2 has no part 'collectives'; it has piece, refill"):
        files.catch_up("2 collectives")


def test_a_part_is_replaced_where_it_stands_and_blanks_are_named(capsys):
    for name in ("a", "b"):
        files.part(f"1 {name}", f"{name} = 1")
    files.part("1 a", "a = [1, 2][...]\nb = ...\n")
    assert "1 times three dots to replace" in capsys.readouterr().out
    assert files.own_parts() == {"a": "a = [1, 2][...]\nb = ...", "b": "b = 1"}
    assert files.blanks("a = [1, 2][...]\nb = ...\n") == ["b = ..."]
    assert "further down" not in capsys.readouterr().out
    files.part("7 prefetch", "def gather(unit):\n    pass")
    files.part("3 collectives", "def gather(unit):\n    pass")
    assert "prefetch of lesson 05, further down, replaces `gather`" in capsys.readouterr().out
    with pytest.raises(ValueError, match="%%part: wants a step and a name"):
        files.part("shard_of", "")


def test_a_cell_with_a_syntax_error_leaves_the_file_and_is_refused_until_it_is_mended(capsys):
    files.part("1 shard_of", "def shard_of(tensor):\n    return tensor")
    files.part("1 shard_of", "def shard_of(tensor)\n    return 0")
    assert capsys.readouterr().out.endswith("Line 1: expected ':'. my_fsdp.py is unchanged.\n")
    assert files.own_parts()["shard_of"].endswith("return tensor")
    assert "has a syntax error" in graded("02.shard", "shard_of", 3)
    files.part("1 shard_of", "def shard_of(tensor):\n    ...")
    assert "in `...` of `shard_of`" in graded("02.shard", "shard_of", 3)


def test_what_is_missing_is_said_before_ranks_are_looked_at():
    assert "has no part 'shard_of' yet" in graded("02.shard", "shard_of", 3)
    files.part("1 shard_of", "def shard_of(tensor):\n    rows = ...\n    return rows")
    assert "three dots in `rows = ...`" in graded("02.shard", "shard_of", 3)
    files.part("1 shard_of", "def shard_of(tensor):\n    return tensor")
    assert "run the `%%ranks 3 02.shard` cell first" in graded("02.shard", "shard_of", 3)


def test_the_copy_for_the_class_catches_up_without_solutions(tmp_path, monkeypatch):
    from course.verify import main

    monkeypatch.setattr("sys.argv", ["verify", "--class", str(tmp_path / "class")])
    assert main() == 0
    packed = tmp_path / "class" / "course"
    assert "shard_of" not in (packed / "parts.txt").read_text()
    finished = tmp_path / "class" / WHOLE.name
    assert "shard_of" not in finished.read_text()
    parts = files.lesson_parts()
    monkeypatch.setattr(files, "HERE", packed)
    assert json.dumps(files.lesson_parts()) == json.dumps(parts)
    monkeypatch.setattr(checks, "__file__", str(packed / "checks.py"))
    checks.unpack_reward("02.shard")
    assert "shard_of" not in finished.read_text()
    checks.unpack_reward("03.predict")
    checks.unpack_reward("03.predict")
    assert finished.read_text() == WHOLE.read_text()


def by_block(shard, model):
    """Shard each block and the root, with the last block and the root kept after forward, as lesson 02 does."""
    for block in model.blocks:
        shard(block, block is not model.blocks[-1])
    shard(model, False)


def test_freeing_a_unit_before_its_reduce_makes_the_peak_lower_than_torchs(monkeypatch):
    def freed_first(unit, grads):
        fsdp_in_200_lines.release(unit)
        fsdp_in_200_lines.reduce(unit, grads[: len(unit.pieces)])

    def mine(model):
        by_block(lambda module, reshard: fsdp_in_200_lines.shard(module, reshard=reshard), model)

    def theirs(model):
        by_block(lambda module, reshard: fully_shard(module, reshard_after_forward=reshard), model)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        above, torchs = peak(mine, toy_lm, texts), peak(theirs, toy_lm, texts)
        monkeypatch.setattr(fsdp_in_200_lines, "after_backward", freed_first)
        below = peak(mine, toy_lm, texts)
    finally:
        dist.destroy_process_group()
    assert below < torchs < above < 1.15 * torchs
