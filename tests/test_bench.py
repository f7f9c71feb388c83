"""mmfsdp bench: sources are measured on the same pictures, ways to shard on the same steps, and all is written down."""

import json
import xml.etree.ElementTree as ET

from mmfsdp.bench import checkpoint
from mmfsdp.bench.data import SOURCES, _read, write_sources
from mmfsdp.bench.startup import IMPORTS
from mmfsdp.bench.step import COMPARED, batch_for, configuration, random_model
from mmfsdp.bench.ways import THEIRS, WAYS
from mmfsdp.cli import main
from mmfsdp.data import open_source
from mmfsdp.params import DataParams, FSDPParams
from mmfsdp.plan import make_plan
from tests.tiny_run import tiny_run


def test_every_source_holds_the_same_pictures_for_both_loops(tmp_path):
    write_sources(tmp_path, 4, 32)
    for kind, fields in SOURCES.items():
        path = tmp_path / fields["path"]
        by_hand = sorted(image.tobytes() for _, images in _read(kind, path) for image in images)
        params = DataParams(source=fields["source"], path=str(path))
        ours = [s for split in ("train", "heldout") for s in open_source(params, split=split, image_size=16)]
        assert sorted(image.tobytes() for sample in ours for image in sample.images) == by_hand, kind
        assert len(by_hand) == 4 * (2 if "document" in kind else 1)


def test_bench_data_prints_a_table_and_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "data", "--pictures", "8", "--side", "32", "--image-size", "16", "--rounds", "2"]) == 0
    found = json.loads((tmp_path / "bench_data.json").read_text())
    assert set(found["sources"]) == set(SOURCES) and found["rounds"] == 2
    text = capsys.readouterr().out
    for kind, row in found["sources"].items():
        assert kind in text and all(row[name] > 0 for name in ("read", "by_hand", "mmfsdp"))
    assert main(["bench", "speed"]) == 2
    (tmp_path / "bench_data.json").unlink()
    (tmp_path / "bench_data.json").mkdir()  # cannot be written, by nobody
    assert main(["bench", "data", "--pictures", "8", "--side", "32", "--image-size", "16", "--rounds", "1"]) == 2
    out = capsys.readouterr()
    assert "samples/s" in out.out and "the figures above are in no file" in out.err


def test_saving_is_measured_in_three_ways():
    rows = checkpoint.bench_checkpoint(ranks=1, every=2, rounds=1, width=64)
    assert [row["way"] for row in rows] == ["no save", "sync", "async"]
    assert rows[1]["bytes"] == rows[2]["bytes"] > 0 and rows[1]["waits_s"] > 0 == rows[0]["waits_s"]
    assert len(checkpoint.table(rows).splitlines()) == 4


def test_bench_wrap_shows_every_way_and_ours_send_less(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "wrap", "--width", "96", "--rounds", "1", "--accumulation", "2"]) == 0
    found = json.loads((tmp_path / "bench_wrap.json").read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert tuple(rows) == WAYS
    text, picture = capsys.readouterr().out, (tmp_path / "bench_wrap.svg").read_text()
    assert ET.fromstring(picture).tag.endswith("svg")
    assert all(way in text and way.replace("'", "&#x27;") in picture for way in WAYS)
    theirs, naive, ddp = rows[THEIRS[0]], rows[THEIRS[2]], rows["DDP"]
    ours = [rows[f"frozen-aware {policy}"] for policy in ("SHARD", "KEEP", "REPLICATE")]
    # The baseline sends twice for two micro-steps, what stays gathered once.
    for row, bar in zip(ours, (0.5, 0.35 / 2, 0.175 / 2), strict=True):
        assert row["wire_bytes"] < bar * theirs["wire_bytes"]
    assert ours[1]["wire_bytes"] < naive["wire_bytes"] and ours[2]["wire_bytes"] < ddp["wire_bytes"]
    for row in ours:
        assert row["gradient_crc"] == naive["gradient_crc"]  # bitwise
        assert row["frozen_changed"] == 0 and row["rest_bytes"] < row["peak_bytes"] < theirs["peak_bytes"]
        assert abs(row["clipped_norm"] / 0.1 - 1) < 1e-4
    assert theirs["clipped_norm"] > 0.15  # each module clipped by itself
    assert found["counting"]["calls"] > 0  # what a call costs may drown in what else the machine does


def test_bench_step_lays_predicted_beside_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "step", "--ranks", "1", "--rounds", "1", "--samples", "16", "--length", "16"]) == 0
    found = json.loads((tmp_path / "bench_step.json").read_text())
    rows, text = {row["way"]: row for row in found["rows"]}, capsys.readouterr().out
    assert tuple(rows) == COMPARED and all(way in text for way in COMPARED) and found["machine"] in text
    for row in rows.values():
        assert 0 < row["utilization"] < 1 and row["flops"] == rows["DDP"]["flops"] > 0
    for policy in ("SHARD", "KEEP", "REPLICATE"):
        row = rows[f"frozen-aware {policy}"]
        assert abs(row["predicted_peak"] / row["peak_bytes"] - 1) < 0.02 and row["predicted_seconds"] > 0


def test_bench_step_on_a_gpu_measures_a_model_that_is_planned_here_without_weights():
    params = configuration(on_gpu=True).change(**{"train.batch_size": 1})
    model = random_model(params.model, meta=True)
    sizes = {name: module.weight.shape[1] for name, module in model.named_modules() if name.endswith("k_proj")}
    assert len(sizes) == 16 and set(sizes.values()) == {2048}
    batch = batch_for(params, model, 0)
    assert batch.input_ids.shape == (1, 512) and batch.media["vision"].shape[-1] == 224
    plan = make_plan(model, FSDPParams(mixed_precision="bf16"), world_size=1, example=batch.inputs())
    gates = [name for name, p in model.named_parameters() if p.requires_grad and name.endswith("_gate")]
    assert len(gates) == 2 * 16 and plan.flops > 0


def test_bench_startup_splits_the_time_to_the_first_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_run(tmp_path, **{"launch.ranks": 1}).to_yaml(tmp_path / "run.yaml")
    assert main(["bench", "startup", "--config", "run.yaml", "--rounds", "1"]) == 0
    found = json.loads((tmp_path / "bench_startup.json").read_text())
    text = capsys.readouterr().out
    assert {"processes", "imports", "model and plan", "wrapping", "the first step"} <= set(found["first_step"])
    assert all(what in text for what in [*IMPORTS, *found["first_step"]])
    assert all(seconds > 0 for seconds in found["seconds"].values())
