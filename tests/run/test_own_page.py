"""The page on own code does as it says: its modules are written to files, and a run uses them."""

import csv
import re
from itertools import islice

import pytest
import torch
import yaml

from mmfsdp import build_model, launch
from mmfsdp.kit.data.open_sources import open_for
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.kit.train.try_own import try_own
from mmfsdp.params.base import leaves
from tests.pages import PAGES
from tests.test_docs import blocks
from tests.tiny_run import tiny_run

PAGE = PAGES / "own_code.md"


@pytest.fixture
def params(tmp_path, monkeypatch):
    """The choices of the page, for a small model, in a folder with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(PAGE, "python"):
        name = re.match(r"# (\w+)\.py\n", block)
        if name:
            (tmp_path / f"{name[1]}.py").write_text(block)
        else:
            exec(compile(block, PAGE.name, "exec"), {})
    (text,) = blocks(PAGE, "yaml")
    own = yaml.safe_load(text)
    assert leaves(own), "the page shows no YAML"
    changes = {"data.source": "own", "data.path": None, "data.reader": own["data"]["reader"]}
    changes |= {f"train.{name}": value for name, value in own["train"].items()}
    changes |= {"train.metrics": "my_score:score", "train.keep_best": "right", "train.eval_every": 2}
    changes["train.callbacks"] += [{"call": "my_watch:Watch", "name": "perceiver.latents", "most": 0.0}]
    changes |= {"train.optimizer": "my_optimizer:build", "train.schedule": "my_optimizer:factor"}
    return tiny_run(tmp_path, **changes, **{"launch.ranks": 1, "train.steps": 6, "train.warmup_steps": 1})


@pytest.mark.real
def test_the_page_on_own_code_is_true(params, tmp_path):
    words = [line for field in ("data.reader", "train.callbacks") for line in try_own(params, field)]
    assert re.match(
        r"my_data:Pictures: 2\d rows to train on, \d held out; first: user: <image> assistant: a ", words[0]
    )
    assert words[1:] == [
        "my_log:CsvLog: on_train_begin, on_step_end",
        "my_watch:Watch: on_train_begin, on_step_end",
    ]
    run = launch(params)
    state = run.wait(600)
    assert state.ok, f"{state}\n{state.traceback}"
    rows = [(int(step), float(loss)) for step, loss in csv.reader((tmp_path / "loss.csv").open())]
    assert rows == [(row["step"], row["loss"]) for row in run.metrics()]
    assert len(rows) == 3, "it asks for the end after the second step"
    begin = "COMPLETED, step 3 of 6: stopped by my_watch:Watch: the norm of perceiver.latents is "
    assert str(state).startswith(begin) and " in step 2, and was " in str(state)
    modules = {"my_data.py", "my_log.py", "my_optimizer.py", "my_score.py", "my_watch.py"}
    assert {path.name for path in (run.path / "code").iterdir()} == modules
    scores = [row["scores"] for row in run.metrics() if "scores" in row]
    assert [list(each) for each in scores] == [["right"]] * 2, "of step 2, and of the last one"
    assert run.result()["best"]["name"] == "right" and run.result()["scores"] == scores[-1]


def test_the_model_of_the_page_is_planned_and_learns(params, tmp_path):
    changes = {"model.build": {"call": "my_model:build", "width": 64}, "data.augment": False, "launch.ranks": 2}
    params = tiny_run(tmp_path, **changes)
    assert not prepare(params, activations=True).plan.lint
    torch.manual_seed(0)
    model, processor = build_model(params.model)
    samples = list(islice(open_for(processor, params)["data"]["train"], 2))
    inputs = processor.try_rows(samples).inputs()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
