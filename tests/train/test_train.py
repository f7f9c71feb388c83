"""train.run on one rank, in this process: what it leaves behind, and when it gives up."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from mmfsdp import ParamError, RunParams, checkpoint
from mmfsdp.checkpoint.steps import complete_checkpoints
from mmfsdp.kit import train
from mmfsdp.kit.run.files.folder import read_metrics
from mmfsdp.kit.run.files.stages import STAGES, progress_of
from mmfsdp.kit.run.ranks.hang import Heartbeat
from mmfsdp.kit.train import job
from mmfsdp.kit.train.process_group import pick_device, process_group
from tests.tiny_run import as_rank, free_port, tiny_run


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Trains the tiny run on one rank in this process, in its run folder."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(**changes):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        params = tiny_run(tmp_path, **{"launch.ranks": 1, "train.accumulation": 1, **changes})
        params.to_yaml(folder / "params.yaml")
        as_rank(0, 1, free_port())
        try:
            train.run(folder)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return folder

    return run


def test_a_run_leaves_metrics_a_plan_a_result_and_checkpoints(go, monkeypatch):
    reports = []
    report = Heartbeat.__call__
    monkeypatch.setattr(Heartbeat, "__call__", lambda beat, words: (reports.append(words), report(beat, words)))
    known = "the files of its language model alone hold no model: rank 0 need not build it without weights first"
    monkeypatch.setattr(job, "open_model", lambda *_, **__: pytest.fail(known))
    folder = go(**{"train.keep_last": 2})
    stages = list(dict.fromkeys(words.partition(" ")[0].rstrip(":") for words in reports))
    # Each is known, and in the order in which they are shown; `importing` comes before this function is imported.
    assert ["importing", *stages, "captions"] == list(STAGES), "what is no stage has no limit of its own"
    places = [progress_of(words) for words in reports]
    assert places == sorted(places)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["loss"] < rows[0]["loss"]
    assert [row["skipped_steps"] for row in rows] == [0] * 6
    assert all(row["rank_tokens_per_s"] == row["tokens_per_s"] > 0 for row in rows), "of one rank"
    assert [path.name for path in complete_checkpoints(folder / "checkpoints")] == ["step_00000004", "step_00000006"]
    result = json.loads((folder / "result.json").read_text())
    assert result["frozen_parameters_changed"] == 0 and result["world_size"] == 1
    peak, longest = result["peak"], json.loads((folder / "plan.json").read_text())["estimate"]["peak_bytes"]
    assert peak["bytes"] == pytest.approx(rows[-1]["memory_bytes"], rel=0.05), "both are of the same batch"
    assert peak["bytes"] < 0.9 * longest
    found = json.loads((folder / "plan.json").read_text())
    assert found["plan"] and found["versions"]["torch"]
    before = (folder / "metrics.jsonl").read_bytes()
    go(**{"train.keep_last": 2})
    assert (folder / "metrics.jsonl").read_bytes() == before, "all steps are done: nothing is trained again"


def test_steps_without_a_finite_loss_end_the_run(go, capfd):
    """That they change nothing: test_resume.py."""
    with pytest.raises(RuntimeError, match="train.max_skipped: .* not finite in 3 steps in a row, up to step 4"):
        go(**{"train.lr": 1e30, "train.warmup_steps": 0, "train.max_skipped": 3})
    assert "skipped: loss nan" in capfd.readouterr().out


def test_other_backbone_weights_than_the_runs_are_found_by_name(go, tmp_path):
    folder = go(**{"train.steps": 2})
    weights = tmp_path / "language" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ParamError, match="1 frozen parameters, such as language_model.* are not those"):
        go(**{"train.steps": 4})
    assert checkpoint.latest(folder / "checkpoints").name == "step_00000002"


DEVICES = {  # visible GPUs, allocated on the node, local rank, ranks of the node, train.device -> its device
    "2 2 1 2 auto": "cuda:1", "1 2 1 2 auto": "cuda:0", "1 2 1 2 cuda": "cuda:0", "2 2 1 2 cpu": "cpu",
    "0 0 1 2 auto": "cpu",
    # Slurm has bound several GPUs to each rank: its own two, or the four beside its socket.
    "2 8 1 4 auto": "cuda:1", "2 8 2 4 auto": "cuda:0", "4 8 3 8 auto": "cuda:3", "4 8 5 8 auto": "cuda:1",
    "0 0 1 2 cuda": "2 ranks, and torch sees 0 GPUs", "0 2 1 2 auto": "sees 0 GPUs", "1 1 1 2 auto": "sees 1 GPU;",
}  # fmt: skip


@pytest.mark.parametrize("case", DEVICES)
def test_a_job_with_gpus_never_trains_on_the_cpu_unasked(monkeypatch, case):
    visible, allocated, local_rank, ranks, wanted = case.split()
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(visible))
    for name, value in {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks, "SLURM_GPUS_ON_NODE": allocated}.items():
        monkeypatch.setenv(name, value)
    try:
        device = str(pick_device(RunParams().change(**{"train.device": wanted, "launch.executor": "slurm"})))
    except ParamError as error:
        device = str(error)
    assert device == DEVICES[case] or f"train.device: {wanted} needs a GPU" in device and DEVICES[case] in device


@pytest.mark.parametrize("visible, device", [(1, "cuda:0"), (0, "cpu")])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_rank_sets_its_gpu_before_it_joins_the_group_that_it_names_it_to(monkeypatch, visible, device, is_local):
    """Otherwise each rank of nccl would guess its GPU from its rank, at the first collective."""
    joined = []

    def join(backend, **options):
        joined.append((backend, options.get("device_id")))
        raise InterruptedError

    as_rank(0, 1, free_port())
    if is_local:
        monkeypatch.setenv("MMFSDP_RUN", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.set_device", joined.append)
    monkeypatch.setattr("torch.distributed.init_process_group", join)
    with pytest.raises(InterruptedError), process_group(RunParams().change(**{"launch.ranks": 1})):
        pass
    gpu = torch.device("cuda", 0)
    assert joined == ([gpu, ("nccl", gpu)] if visible else [("gloo", None)])


def test_a_rank_on_the_cpu_uses_no_gpu_that_is_there(go, monkeypatch):
    """Pinned memory, or a look at the current stream, would make a context on GPU 0 of hundreds of MiB for each rank.

    torch's optimizers look at it where CUDA is available, which fails on a machine without a driver.
    """
    pinned = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    monkeypatch.setattr(
        "mmfsdp.kit.data.loader.DataLoader",
        lambda *args, pin_memory, **options: pinned.append(pin_memory) or DataLoader(*args, **options),
    )
    go(**{"train.device": "cpu", "train.steps": 1, "train.warmup_steps": 0})
    assert pinned == [False]
