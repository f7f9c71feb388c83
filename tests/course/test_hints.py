"""Each check gives three typical wrong answers hints of their own, and passes three forms of the right answer."""

import json
import shutil
import time
from inspect import signature

import numpy as np
import pytest
import torch
import yaml
from answers import CELLS, FUNCTIONS, PARTS, RUNS, SCRIPTS, VALUES, right_answers, wrong_answers
from books import LESSONS, read, solutions
from course.checks import _CHECKS, hint_for, number, passed, progress
from course.lessons import small_run, train
from course.script import edit_script
from tries import SOLUTIONS, hint_for_cell, hint_for_part

from mmfsdp import sweep


def test_each_check_has_three_wrong_answers_and_three_forms_of_the_right_one():
    assert set(SOLUTIONS) == set(VALUES) | set(CELLS) | set(PARTS) | set(SCRIPTS) | set(FUNCTIONS) | set(RUNS)
    counts = {name: (len(right_answers(name)), len(wrong_answers(name))) for name in VALUES}
    # The solution itself is the third, here and below: tests/notebooks.
    for name, cell in (CELLS | PARTS | SCRIPTS | FUNCTIONS).items():
        counts[name] = (len(cell["right"]) + 1, len(cell["wrong"]))
    for name, steps in RUNS.items():
        wrong = sum("hint" in step for step in steps)
        counts[name] = (len(steps) - wrong + 1, wrong)
    assert [name for name, numbers in counts.items() if min(numbers) < 3] == []


def assert_meant(hints, wanted):
    """Each hint has the words that are meant for its answer, and no two answers get the same hint."""
    for hint, words in zip(hints, wanted, strict=True):
        assert hint and words in hint, (words, hint)
    assert len(set(hints)) == len(hints)


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    wrong = wrong_answers(name)
    assert_meant([hint_for(name, *given) for given in wrong.values()], wrong)
    assert [hint_for(name, *given) for given in right_answers(name)] == [None] * len(right_answers(name))


def changed(name, change, line):
    """The first line of a solution in which one thing is changed, and its code."""
    old = change.get("old", line)
    assert old in SOLUTIONS[name], old
    return SOLUTIONS[name].replace(old, change["new"], 1).split("\n", 1)


def hint_for_change(name, change):
    """The hint for a solution in which one thing is changed."""
    first, code = changed(name, change, CELLS[name].get("line"))
    return hint_for_cell(name, int(first.split()[1]), code)


def hint_for_function(name, change):
    """The hint for the function of a solution in which one thing is changed."""
    old = change.get("old", FUNCTIONS[name]["line"])
    assert old in SOLUTIONS[name], old
    names = {"torch": torch, "nn": torch.nn}  # which the lessons import
    exec(SOLUTIONS[name].replace(old, change["new"], 1), names)
    return hint_for(name, names[FUNCTIONS[name]["give"]])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    right, wrong = FUNCTIONS[name]["right"], FUNCTIONS[name]["wrong"]
    assert_meant([hint_for_function(name, change) for change in wrong], [change["hint"] for change in wrong])
    assert [hint_for_function(name, change) for change in right] == [None] * len(right)


@pytest.mark.real
@pytest.mark.parametrize("name", CELLS)
def test_code_on_ranks(rank_server, name):
    right, wrong = CELLS[name]["right"], CELLS[name]["wrong"]
    assert_meant([hint_for_change(name, change) for change in wrong], [change["hint"] for change in wrong])
    assert [hint_for_change(name, change) for change in right] == [None] * len(right)


def hint_for_part_changed(name, change):
    """The hint for a solution of a part of my_fsdp.py in which one thing is changed."""
    return hint_for_part(name, changed(name, change, PARTS[name]["line"])[1])


@pytest.mark.real
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_own_file(rank_server, name):
    wrong = PARTS[name]["wrong"]
    assert_meant([hint_for_part_changed(name, change) for change in wrong], [change["hint"] for change in wrong])


@pytest.mark.real
@pytest.mark.extended  # that the solution is right is tested with its lesson, too: tests/notebooks
@pytest.mark.parametrize("name", PARTS)
def test_other_right_forms_of_parts_of_the_own_file(rank_server, name):
    right = PARTS[name]["right"]
    assert [hint_for_part_changed(name, change) for change in right] == [None] * len(right)


def hint_for_edit(name, diff):
    """The hint for a script of the clinic that is edited so."""
    edit_script(name.removeprefix("08.bug"), diff)
    return hint_for(name)


@pytest.mark.real
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_the_clinic(rank_server, name):
    right, wrong = SCRIPTS[name]["right"], SCRIPTS[name]["wrong"]
    assert_meant([hint_for_edit(name, diff) for diff in wrong.values()], wrong)
    assert [hint_for_edit(name, diff) for diff in right] == [None] * len(right)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """What the steps in RUNS call, and one run of two ranks, which they copy and change."""
    home = tmp_path_factory.mktemp("course")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMFSDP_COURSE", str(home))
        whole = train(small_run(), "whole")
        here = {"whole": whole, "np": np, "torch": torch}

        def copied(name, *, steps=8, loss=0.0, drilled_at=None, ranks=2, strategy="FULL_SHARD", backend="FSDP2"):
            folder = whole.path.parent / name
            shutil.copytree(whole.path, folder, dirs_exist_ok=True)
            rows = [row | {"loss": row["loss"] + loss} for row in whole.metrics()[:steps]]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            params = yaml.safe_load((folder / "params.yaml").read_text())
            params["launch"] = params.get("launch", {}) | {"ranks": ranks, "name": name}
            params["fsdp"] = params.get("fsdp", {}) | {"sharding_strategy": strategy, "backend": backend}
            (folder / "params.yaml").write_text(yaml.safe_dump(params))
            if drilled_at:
                event = {"time": time.time(), "step": drilled_at, "kind": "drill", "text": "drilled"}
                with (folder / "events.jsonl").open("a") as events:
                    events.write(json.dumps(event) + "\n")

        def start_sweep():
            grid = {"train.lr": [1e-4, 1e-2, 1e-1]}
            here["rates"] = sweep(small_run(**{"launch.name": "rates"}), grid=grid, at_once=3)

        def wait_for_sweep():
            here["rates"].wait()
            here["lowest"] = min(here["rates"].rows(), key=lambda row: row["loss"])

        shutil.copytree(whole.path, whole.path.parent / "here")
        here |= {"copied": copied, "start_sweep": start_sweep, "wait_for_sweep": wait_for_sweep}
        yield here


@pytest.mark.real
@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tools, monkeypatch):
    monkeypatch.setenv("MMFSDP_COURSE", str(tools["whole"].path.parent.parent))
    hints, wanted = [], []
    for step in RUNS[name]:
        exec(step.get("do", ""), tools)
        hint = hint_for(name, *([eval(str(step["give"]), tools)] if "give" in step else []))
        if "hint" in step:
            hints.append(hint)
            wanted.append(step["hint"])
        else:
            assert hint is None, (step, hint)
    assert_meant(hints, wanted)


@pytest.mark.parametrize("given", [None, "some words", [], {"a": None}], ids=str)
def test_what_is_no_answer_at_all_gets_a_hint_too(given):
    exercises = {name for path in LESSONS for name in solutions(read(path))} - set(SCRIPTS)  # these take no answer
    for name in sorted(exercises):
        hint_for(name, ...)
        count = len(signature(_CHECKS[name]).parameters)
        assert hint_for(name, *[given] * count), (name, given)


def test_nothing_to_check_yet_is_said():
    assert "run the `%%ranks 2 01.ring` cell first" in hint_for("01.ring")
    assert "three dots" in hint_for("01.wire", ...)
    with pytest.raises(ValueError, match="01.rang"):
        hint_for("01.rang")


def test_progress_is_kept_and_survives_a_broken_file(tmp_path):
    assert progress() == set()
    passed("01.ring")
    passed("02.traffic")
    assert progress() == {"01.ring", "02.traffic"}
    (tmp_path / "progress.json").write_text("{broken")
    assert progress() == set()


def test_a_number_that_fits_no_known_slip_says_which_way():
    assert "formula" in number(5, 10, {}, "a formula.") and "Think of" not in number(5, 10, {}, "another.")
    assert number(5, 10, {}, "a formula.") == "5 is too small. Think of a formula."
    assert number(10.05, 10, {}, "a formula.") is None
