"""A notebook that runs again: the run of its name is found, or what differs is said in a line, before any planning."""

import sys

import pytest

from mmfsdp import ParamError, Run, RunParams, launch
from mmfsdp.kit.run.adopt import changed_code, differences, find_same
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.own_code import sources_of, write_code
from tests.run.test_runs import GONE, record


@pytest.fixture
def params(tmp_path, monkeypatch):
    """Of a run that has completed, with own code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my_adopted.py").write_text("def call(row): ...\n")
    changes = {"launch.folder": str(tmp_path / "runs"), "launch.ranks": 2, "train.callbacks": ["my_adopted:call"]}
    params = RunParams().change(**changes)
    folder = tmp_path / "runs/first"
    folder.mkdir(parents=True)
    params.to_yaml(folder / "params.yaml")
    record(**GONE).write(folder)
    write_json(folder / "status.json", {"status": "COMPLETED"})
    assert changed_code(Run(folder), params) == []
    write_code(folder, sources_of(params))
    return params


def test_a_run_with_own_code_that_was_edited_is_another_one(params, tmp_path):
    run = Run(tmp_path / "runs/first")
    assert find_same(params).run.path == run.path and differences(run, params) == ""
    (tmp_path / "my_adopted.py").write_text("def call(row): print(row)\n")
    assert differences(run, params) == "its own code, which has changed since (my_adopted.py)"
    assert find_same(params).run is None and find_same(params).params.launch.name == "first-2"


def test_a_launch_under_a_name_that_is_taken_says_what_differs(params, tmp_path):
    with pytest.raises(ParamError, match="exists already .* with the same parameters, and Run.open.* opens it; choose"):
        launch(params)
    other = params.change(**{"train.steps": 70})
    words = r"exists already \(COMPLETED.*\) with other parameters: train.steps 100, not 70; choose another name"
    with pytest.raises(ParamError, match=words):
        launch(other)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]
