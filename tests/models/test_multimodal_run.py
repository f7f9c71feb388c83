"""Runs of multimodal models on two ranks, from parameters to captions."""

import gzip
import json

import pytest

from mmfsdp import checkpoint
from mmfsdp.kit.run.files.folder import read_json, read_metrics
from mmfsdp.kit.train.evaluate import caption_held_out
from mmfsdp.kit.widgets.report import report_html
from tests.ranks import in_processes
from tests.tiny_run import free_port, tiny_run, train_runs

pytestmark = pytest.mark.real

MULTIMODAL = {"model.kind": "multimodal", "train.steps": 3, "train.eval_samples": 2}
RUNS = {
    "stage 1": {"train.profile": 1},
    "stage 2": {"model.freeze": ["llava_stage2"], "fsdp.backend": "FSDP1", "model.projector": "linear"},
    "lora": {"model.lora_rank": 2, "fsdp.frozen_dtype": "nf4"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        (folder / name).mkdir()
        tiny_run(folder).change(**MULTIMODAL, **changes).to_yaml(folder / name / "params.yaml")
    in_processes(train_runs, 2, [str(folder / name) for name in RUNS], [free_port() for _ in RUNS])
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_sends_what_was_predicted_and_captions(folder, name):
    run = folder / name
    rows = read_metrics(run)
    assert len(rows) == 3 and rows[-1]["loss"] < rows[0]["loss"]
    result = json.loads((run / "result.json").read_text())
    assert result["wire_bytes_measured"] == result["wire_bytes_predicted"] > 0
    assert result["frozen_parameters_changed"] == 0
    plan = json.loads((run / "plan.json").read_text())["plan"]
    trained = {p["name"] for unit in plan["units"] for p in unit["params"] if p["trainable"]}
    kinds = {"projectors": "projectors", "language_model": "language_model", "lora": "lora_"}
    wanted = {"stage 1": {"projectors"}, "stage 2": {"projectors", "language_model"}}.get(name, {"projectors", "lora"})
    assert all(any(kinds[kind] in p for p in trained) for kind in wanted)
    assert all(any(kinds[kind] in p for kind in wanted) for p in trained)
    assert checkpoint.latest(run / "checkpoints").name == "step_00000003"
    captions = caption_held_out(run)["captions"]
    assert captions and all(isinstance(row["caption"], str) for row in captions)


def test_a_profile_tells_what_ran_beside_what(folder):
    for rank in range(2):
        found = read_json(folder / f"stage 1/profile/rank{rank}.json")
        assert found["steps"] == 1 and {"compute", "all-gather", "all-reduce"} <= set(found["lanes"])
        assert 0 < found["exposed_s"] <= found["communication_s"] < found["seconds"]
        assert found["compute_s"] + found["exposed_s"] <= found["seconds"]
        with gzip.open(folder / f"stage 1/profile/rank{rank}.json.gz") as file:
            assert any(event.get("name") == "gloo:all_gather" for event in json.load(file)["traceEvents"])
    assert not (folder / "stage 2" / "profile").exists()
    page = report_html(folder / "stage 1")
    assert page.count("exposed") >= 2
