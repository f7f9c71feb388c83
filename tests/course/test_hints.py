"""Each check gives three typical wrong answers hints of their own, and passes three forms of the right answer."""

import json
import shutil
import time
from inspect import signature

import numpy as np
import pytest
import torch
import yaml
from answers import CODE, RUNS, VALUES
from books import LESSONS, read, solutions
from course.checks import _CHECKS, hint_for, number, passed, progress
from course.lessons import small_run, train
from course.ranks import run_on_ranks

from mmfsdp import sweep

SOLUTIONS = {name: code for path in LESSONS for name, code in solutions(read(path)).items()}


def test_each_check_has_three_wrong_answers_and_three_forms_of_the_right_one():
    assert set(SOLUTIONS) == set(VALUES) | set(CODE) | set(RUNS)
    few = []
    for name, (right, wrong) in VALUES.items():
        few += [name] if len(right) < 3 or len(wrong) < 3 else []
    for name, (changed, wrong) in CODE.items():  # the solution itself is the third, here and below: tests/notebooks
        few += [name] if len(changed) < 2 or len(wrong) < 3 else []
    for name, steps in RUNS.items():
        right = [words for _, _, words in steps].count(None)
        few += [name] if right < 2 or len(steps) - right < 3 else []
    assert not few


def assert_meant(hints, wanted):
    """Each hint has the words that are meant for its answer, and no two answers get the same hint."""
    for hint, words in zip(hints, wanted, strict=True):
        assert hint and words in hint, (words, hint)
    assert len(set(hints)) == len(hints)


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    right, wrong = VALUES[name]
    assert_meant([hint_for(name, *given) for given, _ in wrong], [words for _, words in wrong])
    assert [hint_for(name, *given) for given in right] == [None] * len(right)


def hint_for_change(name, old, new):
    """The hint for a solution in which one thing is changed."""
    assert old in SOLUTIONS[name], old
    first, code = SOLUTIONS[name].replace(old, new, 1).split("\n", 1)
    run_on_ranks(code, int(first.split()[1]), name)
    return hint_for(name)


@pytest.mark.parametrize("name", CODE)
def test_code_on_ranks(name):
    changed, wrong = CODE[name]
    assert_meant([hint_for_change(name, old, new) for old, new, _ in wrong], [words for *_, words in wrong])
    assert [hint_for_change(name, *change) for change in changed] == [None] * len(changed)


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
            here["rates"] = sweep(small_run(**{"launch.name": "rates"}), grid=grid, at_once=2)

        def wait_for_sweep():
            here["rates"].wait()
            here["lowest"] = min(here["rates"].rows(), key=lambda row: row["loss"])

        shutil.copytree(whole.path, whole.path.parent / "here")
        here |= {"copied": copied, "start_sweep": start_sweep, "wait_for_sweep": wait_for_sweep}
        yield here


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, tools, monkeypatch):
    monkeypatch.setenv("MMFSDP_COURSE", str(tools["whole"].path.parent.parent))
    hints, wanted = [], []
    for code, given, words in RUNS[name]:
        exec(code, tools)
        hint = hint_for(name, *([eval(given, tools)] if given else []))
        if words is None:
            assert hint is None, (code, given, hint)
        else:
            hints.append(hint)
            wanted.append(words)
    assert_meant(hints, wanted)


@pytest.mark.parametrize("given", [None, "some words", [], {"a": None}], ids=str)
def test_what_is_no_answer_at_all_gets_a_hint_too(given):
    exercises = {name for path in LESSONS for name in solutions(read(path))}
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
