"""The arena: files of different quality are ordered, a file that cheats is refused, and a result says what follows from
its counts alone."""

import json
import shutil
from base64 import b64encode
from pathlib import Path

import pytest
import torch
from course.four_bits import file_in_4_bits

from mmfsdp.kit import cli
from mmfsdp.kit.arena.gate import Refused, try_file
from mmfsdp.kit.arena.report import picture, table
from mmfsdp.kit.arena.result import LEVELS, VERSION, read_result
from mmfsdp.kit.arena.rounding import given_model, rounded_weights
from mmfsdp.kit.arena.wall import PROGRESS, RESULT
from mmfsdp.kit.cli.class_copy import read_book, solutions
from mmfsdp.params import ParamError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT.parent / "notebooks"
PLANNED = """
def wrap(model, budget):
    import json
    from mmfsdp import FSDPParams, estimate, make_plan, wrap_fsdp
    from mmfsdp.kit.arena.model import batch, build

    params, example = FSDPParams(frozen_policy="SHARD"), batch(0, 0, 0)
    rows = estimate(make_plan(build(), params, world_size=dist.get_world_size(), example=example)).wire
    with open(f"{__file__}.{dist.get_world_size()}", "w") as file:
        json.dump({f"{row.kind}, {row.phase}": row.wire_bytes for row in rows if row.phase != "control"}, file)
    wrap_fsdp(model, params, example=example)
"""
"""Shards as mmfsdp does, and writes what its plan says."""


def file_of(folder: Path, *added: str, text: str = "", in_4_bits: bool = False) -> Path:
    """The course's file, with what is added to it in tests/files/arena. in_4_bits: by the solution of lesson 11."""
    path = folder / ("_".join(added) or "course") / ("4_bits" if in_4_bits else "") / "my_fsdp.py"
    path.parent.mkdir(parents=True)
    pieces = [(NOTEBOOKS / "fsdp_in_200_lines.py").read_text("utf-8")]
    if in_4_bits:
        cell = solutions(read_book(NOTEBOOKS / "11_change_the_real_one.ipynb"))["11.four_bits"]
        pieces = [file_in_4_bits(pieces[0], cell.split("\n", 1)[1])]
    pieces += [(ROOT / f"files/arena/{name}.py").read_text("utf-8") for name in added if not text]
    path.write_text("\n".join([*pieces, text]), encoding="utf-8")
    return path


@pytest.mark.real
def test_files_of_different_quality_are_ordered_and_their_counts_are_those_of_the_plan(tmp_path, capsys):
    ours = file_of(tmp_path, "planned", text=PLANNED)
    planned = try_file(str(ours))
    assert planned.mine.sent == json.loads(Path(f"{ours}.3").read_text())
    assert sum(planned.mine.sent.values()) < sum(planned.torchs.sent.values())

    course = file_of(tmp_path)
    assert cli.main(["arena", str(course)]) == 0
    plain = read_result(course.with_name("arena.json"))
    assert {"shard", "gradient flow"} <= set(plain.levels) and "prefetch" not in plain.levels

    results = [plain, *(try_file(str(file_of(tmp_path, *added))) for added in (["prefetch"], ["prefetch", "budget"]))]
    numbers = [result.number for result in results]
    assert None not in numbers and numbers == sorted(numbers, reverse=True) and len(set(numbers)) == 3
    assert "prefetch" in results[1].levels and "champion" in results[2].levels
    assert results[2].levels == [level.name for level in LEVELS if level.name != "4 bits"]
    assert results[2].mine.memory.largest < results[1].mine.memory.largest

    rounded = try_file(str(file_of(tmp_path, in_4_bits=True)))
    assert set(rounded.levels) - set(plain.levels) >= {"4 bits"} and rounded.number < plain.number
    assert rounded.mine.rounded * 4 == rounded.mine.whole - rounded.mine.trainable
    with_scales = 36 / 64 / 4  # bytes of 64 numbers in 4 bits with their scale, over those in fp32
    gathers = plain.mine.sent["all-gather, backward"], rounded.mine.sent["all-gather, backward"]
    assert gathers[1] < (with_scales + 0.05) * gathers[0] and rounded.mine.rest < plain.mine.rest / 3

    capsys.readouterr()
    results[2].write(course.with_name("arena.json"))
    assert cli.main(["arena", "--recheck", str(course.with_name("arena.json")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_ms"] == results[2].number
    assert f"best so far {numbers[0]} ms" in table(results[2], numbers[0]) and "<svg" in picture(results[2])
    check_that_a_changed_result_is_refused(course.with_name("arena.json"))
    check_the_page_of_a_class(tmp_path / "class", course.with_name("arena.json"), capsys)


def check_that_a_changed_result_is_refused(path: Path) -> None:
    whole = path.read_text("utf-8")
    for change in (
        {"step_ms": 1.0},
        {"levels": ["shard"]},
        {"points": 7},
        {"version": VERSION + 1},
        {"mine": None},
        {"mine": {**json.loads(whole)["mine"], "events": [["wait", 0]]}},
        {"mine": {**json.loads(whole)["mine"], "rest": -1}},
        {"mine": {**json.loads(whole)["mine"], "events": [["send", "all-gather", 1, "x"]]}},
    ):
        path.write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises(ParamError, match="arena.json"):
            read_result(path)
    path.write_text(whole)


def check_the_page_of_a_class(folder: Path, result: Path, capsys) -> None:
    """Twenty students: one with a result that is no JSON, one whose name is markup, one link to another's folder."""
    for number in range(20):
        student = folder / (f"student {number:02}" if number else "<img src=x onerror=alert(1)>")
        student.mkdir(parents=True)
        (student / PROGRESS).write_text(json.dumps(["01.ring", "02.shard", 7, "<b>"][: number % 5]))
        if number % 2:
            shutil.copy(result, student / RESULT)
    (folder / "student 02" / RESULT).write_text("{")
    (folder / "link").symlink_to(folder / "student 01")
    to = folder / "wall.html"
    assert cli.main(["arena", "--class", str(folder), "--to", str(to)]) == 0
    assert f"{to}: 20 students" in capsys.readouterr().out
    page = to.read_text("utf-8")
    assert page.count("<tr>") == 21 and "<img" not in page and "refused" in page and "<td>link" not in page
    assert page.index("student 19") < page.index("student 04"), "those with a number come first"


@pytest.mark.real
@pytest.mark.parametrize(
    "added, said",
    [
        ("drops_bits", r"up\.weight is \d+% off in forward, and rounding to 4 bits may be 1\d% off"),
        ("rounds_adapters", "projector.weight trains, and its values in the first forward are not the given ones"),
        ("keeps_copies", r"gathers [\d,]+, and it lacks [\d,]+"),
        ("packs_as_numbers", r"gathers [\d,]+, and it lacks [\d,]+"),
    ],
)
def test_a_file_that_rounds_more_than_it_says_is_refused(tmp_path, added, said):
    with pytest.raises(Refused, match=said):
        try_file(str(file_of(tmp_path, added, in_4_bits=True)))


def test_weights_may_be_rounded_as_much_as_by_nf4_if_they_are_frozen():
    name, trains, generator = "layers.0.up.weight", "projector.bias", torch.random.get_rng_state()
    given = {n: p.detach() for n, p in given_model().named_parameters()}
    assert torch.equal(torch.random.get_rng_state(), generator)

    def said(name: str, weight: torch.Tensor) -> tuple[list[str], str]:
        rounded, findings = rounded_weights({name: b64encode(weight.numpy().tobytes()).decode()})
        return list(rounded), "".join(finding.message for finding in findings)

    assert said(name, given[name]) == ([], "")
    assert said(name, given[name].bfloat16().float()) == ([name], "")
    for weight in (torch.zeros_like(given[name]), given[name].flip(0), torch.full_like(given[name], torch.nan)):
        assert "off in forward" in said(name, weight)[1]
    assert "trains" in said(trains, given[trains].bfloat16().float())[1]


@pytest.mark.real
@pytest.mark.parametrize(
    "added, text, said",
    [
        (["patches"], "", r"rank 0 wrote [\d,]+ bytes, and [\d,]+ were counted"),
        (["hides"], "", r"gathers [\d,]+, and it lacks [\d,]+"),
        (
            [],
            "def reduce(unit, grads):\n    for p, g in zip(unit.pieces, grads): p.shard.grad = shard_of(g)",
            "fully_shard",
        ),
        ([], "def shard(*modules, **options):\n    raise ValueError('not yet')", "the file fails: ValueError: not yet"),
    ],
    ids=["patches the counter", "hides weights", "averages nothing", "fails"],
)
def test_a_file_that_cheats_or_fails_is_refused(tmp_path, added, text, said):
    with pytest.raises(Refused, match=said):
        try_file(str(file_of(tmp_path, *added, text=text)))


def test_wrong_words_are_refused_before_any_rank_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for words, said in (
        ([], "give a file of your own, --recheck RESULT or --class FOLDER"),
        (["my.py", "--recheck", "x"], "one of the three"),
        (["my.py"], "'my.py' is not a file; lessons 02 and 03 write my_fsdp.py"),
        (["--class", "nowhere"], "'nowhere' is not a folder"),
        (["--class", "empty"], "has no folder with arena.json or course.json"),
        (["--class", "empty", "--json"], "--json"),
    ):
        assert cli.main(["arena", *words]) == 2
        told = capsys.readouterr()
        assert said in told.err + told.out
    assert cli.main(["arena", "--recheck", "nothing.json"]) == 1
    assert "is not a result of the arena" in capsys.readouterr().out
