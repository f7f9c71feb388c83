"""The page on own code does as it says: its modules are written to files, and a run of two ranks uses them."""

import csv
import re
import sys

import pytest
import yaml

from mmfsdp import launch
from mmfsdp.params.base import leaves
from mmfsdp.train.try_own import try_own
from tests.pages import PAGES
from tests.test_docs import blocks
from tests.tiny_run import tiny_run

PAGE = PAGES / "own_code.md"


@pytest.fixture
def params(tmp_path, monkeypatch):
    """The choices of the page, for a small model, in a folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    modules = []
    for block in blocks(PAGE, "python"):
        name = re.match(r"# (\w+)\.py\n", block)
        if name:
            (tmp_path / f"{name[1]}.py").write_text(block)
            modules.append(name[1])
        else:
            exec(compile(block, PAGE.name, "exec"), {})
    (text,) = blocks(PAGE, "yaml")
    own = yaml.safe_load(text)
    assert leaves(own), "the page shows no YAML"
    changes = {"data.source": "own", "data.path": None, "data.reader": own["data"]["reader"]}
    changes |= {f"train.{name}": value for name, value in own["train"].items()}
    yield tiny_run(tmp_path, **changes, **{"launch.ranks": 2, "train.steps": 3, "train.warmup_steps": 1})
    for name in modules:
        sys.modules.pop(name, None)


@pytest.mark.real
def test_the_page_on_own_code_is_true(params, tmp_path):
    words = [line for field in ("data.reader", "train.callbacks") for line in try_own(params, field)]
    assert re.match(
        r"my_data:Pictures: 2\d rows to train on, \d held out; first: user: <image> assistant: a ", words[0]
    )
    assert words[-1] == "my_log:CsvLog: on_train_begin, on_step_end"
    run = launch(params)
    state = run.wait(90)
    assert state.ok, f"{state}\n{state.traceback}"
    rows = [(int(step), float(loss)) for step, loss in csv.reader((tmp_path / "loss.csv").open())]
    assert rows == [(row["step"], row["loss"]) for row in run.metrics()]
    assert len(rows) == 3
    assert {path.name for path in (run.path / "code").iterdir()} == {"my_data.py", "my_log.py"}
