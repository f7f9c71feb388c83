"""MFU and HFU of a rank's steps, from its own batches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mmfsdp import FSDPParams, make_plan
from mmfsdp.kit.run.files.folder import MetricsWriter
from mmfsdp.kit.train.prepare import example_of, kept_model, plan_for
from mmfsdp.kit.train.utilization import Utilization, batch_work, training_utilization
from mmfsdp.kit.widgets.gpu_table import gpu_table
from mmfsdp.params import load
from mmfsdp.predict.batch_work import BatchWork
from tests.tiny import tiny_batch, tiny_flamingo

PEAK = 1e9


@pytest.fixture
def group():
    """This process as the only rank of a real group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training_of(params, **fields):
    """Return what counts the FLOPs of a training needs of it: its parameters, plan and processor."""
    model, processor = kept_model(params)
    plan, _ = plan_for(model, params, processor)
    values = {"setup": SimpleNamespace(params=params), "plan": plan, "processor": processor, "sources": None}
    return SimpleNamespace(**values, **{"features": None, "beat": lambda activity: None, **fields})


@pytest.fixture(scope="module")
def counted():
    """Return (Utilization, plan) of a tiny Flamingo whose example is one tiny batch."""
    model, example = tiny_flamingo(), tiny_batch().inputs()
    plan = make_plan(model, FSDPParams(), world_size=2, example=example)
    return Utilization(BatchWork.of(model, plan, example), PEAK), plan


def rows_of(utilization, steps, step_s):
    """Return the rows of some steps, given by their micro-batches; each is written after the next one began."""
    rows = [{"step": step, "step_s": step_s} for step in range(1, len(steps) + 1)]
    for row, micro_batches in zip(rows, steps, strict=True):
        with utilization.around_step(row["step"], micro_batches):
            pass
    for row in rows:
        utilization.on_step_end(row)
    return rows


def test_the_shares_of_a_step_are_its_flops_over_its_seconds_and_the_peak(counted):
    utilization, plan = counted
    one, two = rows_of(utilization, [[tiny_batch()], [tiny_batch(), tiny_batch(seed=1)]], 0.5)
    assert one["mfu"] == pytest.approx(plan.flops / 0.5 / PEAK) and two["mfu"] == pytest.approx(2 * one["mfu"])
    assert one["hfu"] == pytest.approx(plan.hardware_flops / 0.5 / PEAK) and one["hfu"] > one["mfu"]
    parameters, tokens = sum(p.numel() for p in tiny_flamingo().parameters()), 2 * 9
    assert one["mfu_6n"] == pytest.approx(6 * parameters * tokens / 0.5 / PEAK)
    assert not utilization.steps_to_come, "what was written is forgotten"


def test_a_smaller_batch_has_fewer_flops(counted):
    utilization, _ = counted
    whole = tiny_batch()
    short = replace(whole, input_ids=whole.input_ids[:, :5], labels=whole.labels[:, :5], attention_mask=None)
    more = replace(whole, media={"vision": whole.media["vision"].repeat(1, 3, 1, 1, 1, 1)})
    of_whole, of_short, of_more = rows_of(utilization, [[whole], [short], [more]], 1.0)
    assert of_short["mfu"] < of_whole["mfu"] < of_more["mfu"]


def test_a_step_with_a_batch_that_cannot_be_counted_has_no_shares(counted):
    utilization, _ = counted
    unknown = SimpleNamespace(inputs=lambda: {"pixel_values": torch.zeros(2, 3, 8, 8)})
    (row,) = rows_of(utilization, [[tiny_batch(), unknown]], 1.0)
    assert row == {"step": 1, "step_s": 1.0}


def test_a_run_on_cpus_counts_nothing():
    assert training_utilization(SimpleNamespace(device=torch.device("cpu"))) is None


def test_a_training_counts_the_batches_of_its_plan():
    params = load("tiny")
    training = training_of(params)
    work = batch_work(training)
    model, processor = kept_model(params)
    assert work.flops(example_of(model, params, processor)).needed == training.plan.flops > 0


def test_with_a_feature_cache_the_encoder_is_not_counted():
    params = load("tiny")
    training = training_of(params, features="cache")
    plan, work = training.plan, batch_work(training)
    samples, patches, width, layers = params.train.batch_size, 6 * 6, 96, 4
    tokens = patches + 1
    encoder = 2 * patches * 3 * 8 * 8 * width + 2 * width * 64  # patches; the pooled output
    encoder += layers * (2 * tokens * 12 * width * width + 4 * tokens * tokens * width)
    assert plan.flops - work.example.needed == pytest.approx(samples * encoder, rel=0.01)
    features = torch.empty(samples, 1, 1, patches, width, device="meta")
    ids = torch.empty(samples, params.data.max_length, dtype=torch.long, device="meta")
    assert work.flops({"input_ids": ids, "labels": ids, "media": {"vision_features": features}}) == work.example


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("precision, peak", [("bf16", 989e12), (None, 67e12)])
def test_on_a_gpu_the_peak_is_that_of_its_card_in_the_format_of_the_model(monkeypatch, group, precision, peak):
    """torch's own call for the name is replaced: there is no GPU here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    params = load("tiny").change(**{"fsdp.mixed_precision": precision})
    training = training_of(params, device=GPU)
    utilization = training_utilization(training)
    assert utilization.peak == peak and utilization.work.example.needed == training.plan.flops
    if precision is None:
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert training_utilization(training) is None, "TensorFloat-32 has another peak"


def test_on_an_unknown_card_nothing_is_traced(monkeypatch, group):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    training = training_of(load("tiny"), device=GPU, beat=lambda activity: pytest.fail(activity))
    assert training_utilization(training) is None


def test_a_model_that_cannot_be_counted_trains_without(monkeypatch, group, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    training = training_of(load("tiny"), device=GPU)
    training.setup.params = None
    assert training_utilization(training) is None
    assert "MFU and HFU are not known: AttributeError" in capsys.readouterr().out


def test_the_report_has_a_line_for_each_rank_on_a_gpu(tmp_path):
    for rank in range(2):
        writer = MetricsWriter(tmp_path, rank)
        for step, mfu in enumerate((0.1, 0.31, 0.33), 1):  # the first step is slow
            row = {"step": step, "mfu": mfu + rank / 10, "hfu": mfu + 0.1, "mfu_6n": mfu * 1.5}
            writer.write(row | {"memory_bytes": 3 << 30, "reserved_bytes": 4 << 30})
    html = gpu_table(tmp_path, 2)
    assert html.count("<tr>") == 3 and "31.0%" in html and "41.0%" in html and "46.5%" in html and "4 GiB" in html
    assert "power" not in html, "columns that nobody knows are left out"


def test_a_run_on_cpus_has_no_table_of_gpus(tmp_path):
    MetricsWriter(tmp_path).write({"step": 1, "loss": 1.0, "memory_bytes": 1 << 20})
    assert gpu_table(tmp_path, 2) == ""
