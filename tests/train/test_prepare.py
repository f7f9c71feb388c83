"""What every launch begins with: data opened once, the plan checked, the same findings, and nothing started before."""

import importlib
import json
import re
import sys
from argparse import Namespace
from functools import partial
from itertools import pairwise

import pytest
from tiny_run import tiny_run

from mmfsdp import ParamError, launch, sweep
from mmfsdp.kit.cli import running
from mmfsdp.kit.data.loader import batches
from mmfsdp.kit.data.sources import records
from mmfsdp.kit.run.files.folder import write_json
from mmfsdp.kit.run.files.run_record import TRAIN
from mmfsdp.kit.run.launch import start as real_start
from mmfsdp.kit.run.start import prepared
from mmfsdp.kit.train import data_batch
from mmfsdp.kit.train.data_batch import input_bytes
from mmfsdp.kit.train.handed_plan import NO_PLAN, shapes_of, take_plan
from mmfsdp.kit.train.job import different_units
from mmfsdp.kit.train.prepare import frozen_model, kept_model, opened, peak_of, prepare, preview
from mmfsdp.kit.widgets.form import RunForm
from mmfsdp.kit.widgets.starter import Starter
from mmfsdp.params import RunParams, load
from mmfsdp.params.findings import FEW_ROWS
from mmfsdp.params.in_words import size
from mmfsdp.predict import plan_cache
from mmfsdp.predict.plan_cache import PlanCache


def test_a_mistake_that_only_a_plan_shows_starts_nothing(tmp_path):
    params = tiny_run(tmp_path, **{"model.freeze": ("*",)})
    for begin in (launch, prepare, lambda p: sweep(p, grid={"train.lr": [1e-3, 1e-4]})):
        with pytest.raises(ParamError, match="leaves nothing to train"):
            begin(params)
        assert not (tmp_path / "runs").exists()


@pytest.fixture
def begun(monkeypatch):
    """Paths of data that were opened, and (name, whether with a plan) of each run that was to start."""
    opened, started = [], []
    read = records.read_records

    def count(params):
        opened.append(params.path)
        return read(params)

    def take_down(params, entry, plan, code):
        started.append((params.launch.name, bool(plan)))
        raise InterruptedError  # nothing is started

    assert real_start.__name__ == "start"
    monkeypatch.setattr(records, "read_records", count)
    monkeypatch.setattr(importlib.import_module("mmfsdp.kit.run.launch"), "start", take_down)
    return opened, started


def test_every_way_to_begin_opens_the_data_once_and_tells_the_same(begun, tmp_path, monkeypatch, capsys):
    opened, started = begun
    params = tiny_run(tmp_path, **{"fsdp.backend": "FSDP1", "fsdp.auto_wrap_policy": "NO_WRAP", "launch.name": "one"})
    path = params.data.path
    monkeypatch.setattr(running, "chosen_params", lambda values: params)

    findings = []
    with pytest.raises(InterruptedError):
        launch(params, tell=findings.append)
    told = [finding.message for finding in findings]
    assert opened == [path] and told

    ready = prepare(params)
    with pytest.raises(InterruptedError):
        launch(ready, tell=pytest.fail)  # whoever prepared it has the findings
    assert opened == [path] * 2

    with pytest.raises(InterruptedError), pytest.warns(UserWarning) as warned:
        launch(params)
    to_warn_of = [finding for finding in findings if finding.level != "note"]
    assert {warning.filename for warning in warned} == {__file__} and len(warned) == len(to_warn_of)
    opened.pop()
    started.pop()

    with pytest.raises(InterruptedError):
        running.launch(Namespace(dry_run=False))
    by_command = capsys.readouterr().err
    assert opened == [path] * 3

    with pytest.raises(InterruptedError):
        running.run(Namespace())
    by_run = capsys.readouterr().out
    assert opened == [path] * 4 and started == [("one", True)] * 4
    assert [finding.message for finding in ready.plan.lint] == told
    for printed in (by_command, by_run):
        places = [" ".join(printed.split()).index(message[:60]) for message in told]
        assert all(before < after for before, after in pairwise(places))


def test_the_button_and_the_command_write_the_same_plan_and_the_button_counts_nothing_twice(
    tmp_path, monkeypatch, capsys
):
    params, plans = tiny_run(tmp_path), []

    def take_down(params, entry, plan, code):
        plans.append(plan)
        raise InterruptedError  # nothing is started

    monkeypatch.setattr(importlib.import_module("mmfsdp.kit.run.launch"), "start", take_down)
    monkeypatch.setattr(running, "chosen_params", lambda values: params)
    with pytest.raises(InterruptedError):
        running.run(Namespace())
    estimate = plans[0]["estimate"]
    assert estimate["batch_peak_bytes"] and estimate["batch"] == "the largest batch of the run"
    params.to_yaml(tmp_path / "one.yaml")
    monkeypatch.setattr(plan_cache, "record_memory", pytest.fail)  # the plan that a cockpit shows has them
    starter = Starter(RunForm(str(tmp_path / "one.yaml")), show=lambda: None)
    starter.start(params)
    with pytest.raises(InterruptedError):
        starter.wait()
    assert plans[1] == plans[0]


def test_the_peak_of_a_batch_of_the_data_stands_beside_that_of_the_longest_texts(tmp_path):
    params = tiny_run(tmp_path, **{"train.seed": 3, "launch.ranks": 2, "data.max_length": 30})
    plan, cost = preview(params)
    _, processor = kept_model(params)
    number = params.train.steps * params.train.accumulation
    streams = [batches(params.data, processor, batch_size=2, seed=3, rank=rank, world_size=2) for rank in range(2)]
    accumulation = params.train.accumulation
    made = [(next(stream).inputs(), i % accumulation == 0) for i in range(number) for stream in streams]
    largest, first = max(made, key=lambda batch: (input_bytes(batch[0]), not batch[1]))
    peak_in_run = partial(peak_of, params, plan, first=first)
    assert cost.batch == "the largest batch of the run" and cost.data.covers_run
    assert cost.batch_peak_bytes == peak_in_run(largest)["bytes"] < cost.peak_bytes
    same_shapes = {**largest, "input_ids": largest["input_ids"].flip(0), "labels": largest["labels"].flip(0)}
    assert cost.batch_shapes == tuple(shapes_of(same_shapes)), "by which a rank knows that it has been predicted"
    assert peak_in_run(same_shapes)["bytes"] == cost.batch_peak_bytes
    assert cost.to_dict()["batch_peak_bytes"] == cost.batch_peak_bytes
    assert f"with {cost.batch} it is {size(cost.batch_peak_bytes)}" in str(cost)
    assert prepare(params, activations=True).cost == cost, "whether the data are open or not"

    alone = params.change(**{"launch.ranks": 1, "train.accumulation": 1})
    one = peak_of(alone, preview(alone)[0], largest, first=True)["bytes"]
    assert preview(alone)[1].batch_peak_bytes == one != cost.batch_peak_bytes


def test_a_step_that_takes_more_rows_than_there_are_is_told_before_a_rank_starts(tmp_path):
    params = tiny_run(tmp_path, **{"launch.ranks": 2})

    def few_rows(changed) -> list[str]:
        return [finding.message for finding in prepare(changed).plan.lint if finding.code == FEW_ROWS]

    assert few_rows(params) == []
    (text,) = few_rows(params.change(**{"train.batch_size": 3, "launch.ranks": 4}))
    assert "a step takes 24 (batch size 3 x accumulation 2 x 4 ranks), so each step has rows several times" in text
    rows = opened(params)["data"]["train"].length
    assert text.startswith(f"data.path: {rows} rows to train on, and ")


def test_data_that_are_not_quick_to_read_are_named_and_leave_the_plan_as_it_is(tmp_path, monkeypatch):
    params = tiny_run(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{" * 100)
    cases = {
        "is not on this machine": {"data.path": str(tmp_path / "nowhere")},
        "the hub is not asked": {"data.source": "hub", "data.path": "some/rows"},
        "your own reader is not called": {"data.source": "own", "data.path": None, "data.reader": "rows.py:read"},
        "rows.jsonl": {"data.source": "json", "data.path": str(rows)},
    }
    for words, changes in cases.items():
        plan, cost = preview(params.change(**changes))
        assert plan.memory_events and cost.peak_bytes and cost.batch_peak is None
        assert words in cost.batch and "it is not known: the data were not looked at" in " ".join(str(cost).split())
    monkeypatch.setattr(data_batch, "MAX_ENTRIES", 2)
    monkeypatch.setattr(data_batch, "MAX_BYTES", 10)
    assert "more than 2 files" in data_batch.slow_to_read(params.data)
    assert "has 100 B" in data_batch.slow_to_read(params.change(**cases["rows.jsonl"]).data)
    assert not data_batch.slow_to_read(load("tiny").data)
    no_tokenizer = data_batch.look_at_data(params, None, PlanCache())
    assert not no_tokenizer.largest and "tokenizer is not on this machine" in no_tokenizer.words


def test_a_job_may_be_submitted_from_a_machine_without_the_libraries_and_is_told_unplanned(tmp_path, monkeypatch):
    params, told = tiny_run(tmp_path), []
    monkeypatch.setitem(sys.modules, "mmfsdp.kit.train.prepare", None)  # its import fails, as without torch
    slurm = {"launch.executor": "slurm", "launch.timeout_min": 60}  # else Slurm would be asked for the partition's
    job, plan, _ = prepared(params.change(**slurm), TRAIN, told.append)
    assert job.launch.ranks == 2 and not plan
    assert [finding.code for finding in told] == ["not-planned"] and "prepare" in told[0].message
    with pytest.raises(ImportError):
        prepared(params, TRAIN, told.append)


def test_ranks_take_the_plan_of_a_launch_only_as_it_was_made_for_their_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    params = tiny_run(tmp_path)
    made = prepare(params)
    model, _ = kept_model(params)
    written = made.to_dict()

    def taken(values: dict, params=made.params, model=model):
        write_json(tmp_path / "plan.json", values)
        return take_plan(tmp_path, RunParams.from_dict(params.to_dict()), model)

    assert taken(written) == (made.plan, made.cost.wire_bytes, "", None) and made.plan.memory_events
    assert taken({"plan": written["plan"]}) == NO_PLAN
    looked = prepare(params, activations=True)
    assert taken(looked.to_dict()).batch_peak[1:] == (looked.cost.batch_peak_bytes, looked.cost.batch_peak.when)

    altered = json.loads(json.dumps(written))
    altered["plan"]["units"][0]["reshard_after_forward"] ^= True
    assert taken(altered) == "plan.json is not as your key has sealed it"
    assert taken(written | {"seal": ""}) == taken(altered)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another person"))
    assert taken(written) == taken(altered)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    assert taken(written, made.params.change(**{"train.batch_size": 3})).startswith("parameters of the launcher's plan")
    more = made.params.change(**{"launch.ranks": 4})
    assert re.search(r"ranks, .* differ: \[\d, .*\], now \[4, ", taken(written, more))
    assert taken(written, made.params.change(**{"launch.name": "other", "launch.silence_s": 9})) == taken(written)
    other, _ = frozen_model(params.model)
    assert taken(written, model=other) == taken(written)
    next(p for p in other.parameters() if not p.requires_grad).requires_grad_(True)
    assert taken(written, model=other) == "modules and tensors of the launcher's plan differ"


def test_ranks_name_the_units_that_a_launch_planned_otherwise(tmp_path):
    params = tiny_run(tmp_path)
    first, same = prepare(params), prepare(params, activations=True)
    assert same.plan.memory_events and not different_units(first.plan.to_dict(), same.plan)
    other = prepare(params.change(**{"fsdp.frozen_policy": "REPLICATE"})).plan
    found = different_units(first.plan.to_dict(), other)
    assert found and {unit.name for unit in other.units if unit.kind == "frozen"} == set(found)
