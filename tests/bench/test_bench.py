"""mmfsdp bench wrap and bench step, at their smallest: the rows, the table and the files."""

import ast
import json
import os
import re
import signal
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fake_group
from tiny import tiny_batch, tiny_flamingo

from mmfsdp.core.planner import trace_and_group
from mmfsdp.core.token_loss import computes_loss_in_head
from mmfsdp.kit import spawn_ranks
from mmfsdp.kit.bench import bench_models
from mmfsdp.kit.bench.bench_models import COMPARED, CORNSTARCH, IN_HEAD, METHODS, OPENFLAMINGO, OURS, random_model
from mmfsdp.kit.bench.bench_step import LARGE, batch_for, bench_step, table
from mmfsdp.kit.cli import main
from mmfsdp.kit.models.kinds import kind_of
from mmfsdp.kit.models.loss_in_head import loss_in_head
from mmfsdp.kit.train.prepare import cache_by_key, kept_by_key
from mmfsdp.params import FSDPParams, ParamError, load
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate
from mmfsdp.predict.memory_events import record_memory
from mmfsdp.predict.plan_cache import PlanCache
from tests.bench.mutants import (
    ROOMS,
    KilledError,
    all_mutants,
    covering_tests,
    equal_mutants,
    in_child,
    mutants_of,
    noting_calls,
    stage_of,
)

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.real
def test_bench_wrap_shows_every_method_and_ours_send_less(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "wrap", "--width", "64", "--rounds", "1"]) == 0
    result, (text, log) = json.loads((tmp_path / "bench_wrap.json").read_text()), capfd.readouterr()
    assert "Warning" not in log, "ranks print no warnings that a person can do nothing about"
    assert max(map(len, text.splitlines())) <= 80
    rows = {row["way"]: row for row in result["rows"]}
    assert tuple(rows) == METHODS
    assert all(method in text for method in METHODS)
    assert result["machine"] in " ".join(text.split())
    theirs, by_layer, ddp = rows[OPENFLAMINGO], rows[CORNSTARCH], rows["DDP"]
    ours = [rows[f"frozen-aware {policy}"] for policy in ("SHARD", "KEEP", "REPLICATE")]
    for row, bar in zip(ours, (0.5, 0.35, 0.175), strict=True):
        assert row["wire_bytes"] < bar * theirs["wire_bytes"]
    assert ours[1]["wire_bytes"] < by_layer["wire_bytes"] and ours[2]["wire_bytes"] < ddp["wire_bytes"]
    for row in ours:
        assert row["rest_bytes"] < row["peak_bytes"] < theirs["peak_bytes"]
        assert abs(row["clipped_norm"] / 0.1 - 1) < 1e-4
    for name, whole in IN_HEAD.items():
        # At this width all logits are less than a piece, and the gradients that the head keeps until backward are more.
        assert rows[name]["wire_bytes"] == rows[whole]["wire_bytes"]
        assert rows[name]["peak_bytes"] < theirs["peak_bytes"]
        assert abs(rows[name]["clipped_norm"] / 0.1 - 1) < 1e-4
    assert theirs["clipped_norm"] > 0.15  # each module clipped by itself
    assert main(["bench", "speed"]) == 2
    assert "invalid choice: 'speed' (choose from" in capfd.readouterr().err


def test_bench_redraw_records_a_model_once_for_every_policy_and_number_of_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recorded = []
    monkeypatch.setattr(
        "mmfsdp.predict.plan_cache.record_memory",
        lambda model, plan, example: recorded.append(plan.backend) or record_memory(model, plan, example),
    )
    kept_by_key.cache_clear()
    cache_by_key.cache_clear()
    assert main(["bench", "redraw", "--preset", "tiny", "--ranks", "4"]) == 0
    result, text = json.loads((tmp_path / "bench_redraw.json").read_text()), capsys.readouterr().out
    rows = {row["change"]: row for row in result["rows"]}
    assert {"first plan", "KEEP", "REPLICATE", "SHARD on 2 ranks", "DDP, first", "AUTO, first"} <= rows.keys()
    assert all(name in text for name in rows) and all(row["seconds"] > 0 for row in rows.values())
    once_a_batch = ["FSDP2"] * 2 + ["DDP"] * 2  # the longest batch, and one of the run's own data
    assert recorded == once_a_batch, "AUTO's units are in the order in which they were registered, too"
    assert max(row["page_bytes"] for row in rows.values()) < 120_000, "both pictures, and the table of units"


def test_bench_panel_sends_a_page_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "panel", "--rows", "5000", "--rounds", "2"]) == 0
    result, text = json.loads((tmp_path / "bench_panel.json").read_text()), capsys.readouterr().out
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows) == ["first show", "a row more", "a resize", "a zoom"] and all(name in text for name in rows)
    assert rows["a row more"]["sent_bytes"] < rows["first show"]["sent_bytes"] / 4 < rows["a resize"]["sent_bytes"]
    assert all(row["seconds"] > 0 for row in rows.values())


@pytest.mark.real
def test_bench_step_shows_every_method(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "step", "--ranks", "1", "--rounds", "1"]) == 0
    found = json.loads((tmp_path / "bench_step.json").read_text())
    rows, text = {row["way"]: row for row in found["rows"]}, capsys.readouterr().out
    assert tuple(rows) == COMPARED and all(way in text for way in COMPARED)
    assert found["machine"] in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80
    for row in rows.values():
        assert row["utilization"] > 0 and row["peak_bytes"] > 0
    assert found["flops"] > 0


def test_methods_are_measured_alone_where_memory_is_a_gpu_s():
    made, reported = {}, []

    def make(name):
        assert all(model() is None for model in made.values()), "the methods before are still in memory"
        if name == "too large":
            raise torch.OutOfMemoryError("CUDA out of memory")
        method = bench_models.wrap_as(name, tiny_flamingo(), tiny_batch().inputs())
        made[name] = weakref.ref(method.model)
        return method

    names = ("frozen-aware SHARD", "too large", "frozen-aware SHARD, in head")
    with fake_group(1):
        rows = bench_models.one_by_one(names, make, tiny_batch(), 1, bench_models.CPU, reported.append)
    assert reported == rows and tuple(row["way"] for row in rows) == names
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in (rows[0], rows[2]))
    assert rows[1] == {"way": "too large", "failed": "out of memory"}
    known = {"samples_per_s": 1.0, "utilization": 0.5, "hardware_utilization": 0.5}
    text = table({"title": "three", "rows": [rows[0] | known, rows[1]]})
    assert "too large" in text and "out of memory" in text


def test_ranks_on_gpus_join_with_their_own(monkeypatch, tmp_path):
    """torch's own calls are noted, not made: there is no GPU here."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: calls.append(("join", k["device_id"])))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append(("barrier", None)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    spawn_ranks.work_in_group(1, str(tmp_path), 2, lambda: None, (), "nccl", None, 2)
    assert calls == [("set_device", torch.device("cuda", 1)), ("join", torch.device("cuda", 1)), ("barrier", None)]
    calls.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    spawn_ranks.work_in_group(1, str(tmp_path), 2, lambda: None, (), "gloo", None, 0)
    assert calls == [("join", None), ("barrier", None)] and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="ranks: 3, and nccl needs a GPU for each; this machine has 2"):
        spawn_ranks.on_ranks(print, 3, backend="nccl")
    with pytest.raises(ParamError, match="ranks"):
        bench_step(ranks=3)


def test_ranks_share_gpus_only_if_they_are_asked_to_and_nccl_can(monkeypatch, tmp_path):
    """torch's own calls are noted, not made: there is no GPU here."""
    joined = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: joined.append(k["device_id"]))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv(spawn_ranks.SHARING, "")
    for rank in range(4):
        spawn_ranks.work_in_group(rank, str(tmp_path), 4, lambda: None, (), "nccl", None, 2)
    assert [device.index for device in joined] == [0, 1, 0, 1] and os.environ[spawn_ranks.SHARING] == "1"
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for gpus, share, words in ((1, False, "a GPU for each"), (0, True, "a GPU for each"), (1, True, "NCCL 2.29.7")):
        with pytest.raises(ValueError, match=words):
            spawn_ranks.check_sharing(2, gpus, share_gpus=share)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 0))
    spawn_ranks.check_sharing(2, 1, share_gpus=True)


def test_a_bench_on_the_cpu_takes_no_gpu_that_the_machine_has(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    with fake_group(2):
        for name in (CORNSTARCH, "frozen-aware SHARD"):
            model = bench_models.wrap_as(name, tiny_flamingo(), tiny_batch().inputs()).model
            assert {p.device_mesh.device_type for p in model.parameters() if hasattr(p, "device_mesh")} == {"cpu"}


def test_methods_that_differ_in_the_policy_alone_are_traced_once(monkeypatch):
    traced = []
    monkeypatch.setattr(
        "mmfsdp.predict.plan_cache.trace_and_group",
        lambda model, *rest: traced.append(model) or trace_and_group(model, *rest),
    )
    cache, in_head = PlanCache(), "frozen-aware SHARD, in head"
    with fake_group(2):
        for name in ("frozen-aware SHARD", "frozen-aware KEEP", "frozen-aware REPLICATE", in_head, "DDP"):
            bench_models.wrap_as(name, tiny_flamingo(), tiny_batch().inputs(), cache=cache)
    assert len(traced) == 3, "that whose loss is in the head is another model, and DDP has other units"


def test_bench_step_on_a_gpu_measures_a_model_that_is_planned_here_without_weights():
    params = load("clip_llama_1b").change(**LARGE, **{"train.batch_size": 1, "model.loss_in_head": True})
    model = random_model(params.model, meta=True)
    assert not computes_loss_in_head(model), "methods of other projects have whole logits, whatever a run has"
    sizes = {name: module.weight.shape[1] for name, module in model.named_modules() if name.endswith("k_proj")}
    assert len(sizes) == 16 and set(sizes.values()) == {2048}
    batch = batch_for(params, model, 0)
    assert batch.input_ids.shape == (1, 512) and batch.media["vision"].shape[-1] == 224
    plan = make_plan(model, FSDPParams(mixed_precision="bf16"), world_size=1, example=batch.inputs())
    gates = [name for name, p in model.named_parameters() if p.requires_grad and name.endswith("_gate")]
    assert len(gates) == 2 * 16 and plan.flops > 0


def test_the_case_of_the_page_on_gpus_needs_about_half_of_openflamingos_memory():
    """Of the predicted peak and the measured one of OpenFlamingo's scheme, 16 samples, one rank."""
    page = (ROOT / "notebooks/reference/gpu.md").read_text()
    [theirs] = re.findall(r"\| OpenFlamingo's scheme \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", page)
    params = load("clip_llama_1b").change(**LARGE, **{"train.batch_size": 16, "train.device": "cuda"})
    model = random_model(params.model, meta=True)
    assert loss_in_head(model) == ""
    example = kind_of(params.model).example(model, params, None)
    fields = {**OURS["frozen-aware SHARD"], "mixed_precision": "bf16"}
    plan = make_plan(model, FSDPParams(**fields), world_size=1, example=example)
    assert estimate(plan, params.train).peak_bytes / 1e9 <= 0.52 * float(theirs)


def test_each_mutant_is_a_program_that_differs_in_one_line():
    file = "mmfsdp/predict/wire.py"
    source = (ROOT / file).read_text()
    mutants = mutants_of(file, source)
    assert len(mutants) > 20
    for mutant in mutants:
        changed = mutant.apply(source)
        ast.parse(changed)
        pairs = zip(source.splitlines(), changed.splitlines(), strict=True)
        assert [number for number, (a, b) in enumerate(pairs, 1) if a != b] == [mutant.line], mutant
    functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    noting = noting_calls(file, source)
    assert all(f"_called.add('{file}:{name}')" in noting for name in functions)


def test_each_mutant_that_is_said_to_be_equal_is_one_of_a_line_that_is_still_there():
    mutants = all_mutants()
    sources = {mutant.file: (ROOT / mutant.file).read_text() for mutant in mutants}
    changes = {(mutant.file, *mutant.lines(sources[mutant.file])) for mutant in mutants}
    equal = equal_mutants()
    assert equal.keys() <= changes
    assert all(len(reason) > 20 for reason in equal.values())


def test_a_changed_folder_is_tried_against_the_tests_of_its_folder_and_those_that_import_it():
    found = covering_tests(ROOMS)
    for folder in ("core", "predict"):
        assert {f"tests/{folder}/{path.name}" for path in (ROOT / "tests" / folder).glob("test_*.py")} <= set(found)
    assert {"tests/models/test_loading.py", "tests/train/test_prepare.py"} <= set(found)
    assert "tests/run/test_fork.py" not in found
    assert covering_tests(["mmfsdp/quantized"]) == ["tests/core/test_quantize.py"]


def test_a_mutants_tests_are_fast_ones_then_real_ones_then_those_of_make_test_all(request):
    class Marked:
        def __init__(self, *marks: str) -> None:
            self.get_closest_marker = marks.__contains__

    assert [stage_of(Marked(*marks)) for marks in ((), ("real",), ("real", "extended"), ("extended",))] == [
        *("fast", "real", "extended", "extended"),
    ]


def test_an_error_of_the_tool_itself_is_no_killed_mutant():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: 1 // 0, limit_s=60)
    with pytest.raises(KilledError, match="SIGKILL"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), limit_s=60)
    assert in_child(lambda: 3, limit_s=60) == 3
