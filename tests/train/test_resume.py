"""Resume: broken off and taken up again, a run ends as the unbroken one does, to the last bit; and what else may
change between its parts."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mmfsdp import checkpoint
from mmfsdp.kit.data import open_source
from mmfsdp.kit.run.files.folder import read_events, read_metrics
from mmfsdp.kit.run.files.watched_file import read_watched
from mmfsdp.kit.train import prepare
from mmfsdp.kit.train.evaluate import captions, load_run, new_samples
from mmfsdp.params import RunParams
from tests.fault_entries import on_batches
from tests.ranks import in_processes
from tests.tiny_run import free_port, tiny_run, train_as_rank

pytestmark = pytest.mark.real

SAME = {
    "FSDP1": {"fsdp.backend": "FSDP1", "fsdp.state_dict_type": "FULL_STATE_DICT"},
    "FSDP1-local": {"fsdp.backend": "FSDP1", "fsdp.state_dict_type": "LOCAL_STATE_DICT"},
    "fp16": {"fsdp.mixed_precision": "fp16", "train.lr_for": {"perceiver.*": 1e-4, "perceiver.latents": 3e-4}},
    "several-sources-and-workers": {"data.workers": 2, "train.accumulation": 1, "fsdp.backend": "DDP"},
    "written-beside": {"train.async_save": True, "fsdp.backend": "DDP", "fsdp.state_dict_type": "FULL_STATE_DICT"},
    "FSDP2": {"train.eval_every": 3},
}
OTHER = {
    "DDP": {"fsdp.backend": "DDP"},
    "FSDP1": {"fsdp.backend": "FSDP1"},
    "ZeRO-2": {"fsdp.sharding_strategy": "SHARD_GRAD_OP", "fsdp.frozen_policy": "REPLICATE"},
    "one-rank": {"train.batch_size": 4, "launch.ranks": 1},
}
BACKENDS = ("DDP", "FSDP1", "FSDP2")
PERCEIVER = "perceiver.*"


def runs_of_two_ranks(rank: int, _: str, folder: str, ports: list[int]) -> dict[str, str]:
    """Every run of this file that takes two ranks. Returns what failed."""
    ports, failed = iter(ports), {}
    if rank:
        prepare.plan_for = None  # it takes rank 0's plan: to plan once more would fail here

    def go(name: str, params: RunParams, *, after: Path | None = None, step: int = 2, ranks: int = 2) -> Path:
        run = Path(folder, name)
        error = train_as_rank(rank, run, lambda: params, port=next(ports), ranks=ranks, after=after, step=step)
        if error:
            failed[name] = error
        return run

    base = tiny_run(Path(folder))
    more = {"source": "folder", "path": base.data.path, "weight": 0.5, "batch_size": 3}
    SAME["several-sources-and-workers"]["data.more"] = [more]
    for name, changes in SAME.items():
        whole = go(name, base.change(**changes))
        # Without workers, whose start in the middle test_loader.py compares: each of them imports torch.
        resumed = base.change(**changes).change(**{"train.eval_every": 3, "data.workers": 0})
        go(f"{name}-resumed", resumed, after=whole)
    for name, changes in OTHER.items():
        go(f"on-{name}", base.change(**changes), after=whole, ranks=1 if name == "one-rank" else 2)
    less = base.change(**{"model.freeze": [*base.model.frozen_patterns, PERCEIVER]})
    frozen = go("frozen", less.change(**{"train.save_every": 1}), after=whole)
    go("thawed", base, after=frozen, step=3)
    if rank:
        on_batches(poison)
    for name, backend in ((f"poisoned-{backend}", backend) for backend in BACKENDS):
        go(name, base.change(**{"fsdp.backend": backend, "train.max_skipped": 3, "train.save_every": 1}))
        dist.destroy_process_group()
        if "loss or gradient was not finite in 3 steps in a row, up to step 5" in failed.get(name, "nothing"):
            del failed[name]
    return failed


def poison(step: int, batches: list) -> None:
    """From the third step on, this rank's pictures are no numbers."""
    for batch in batches if step > 2 else []:
        batch.media["vision"].fill_(float("nan"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder)
    failed = in_processes(runs_of_two_ranks, 2, str(folder), [free_port() for _ in range(30)])
    assert failed == [{}, {}], "\n".join(text for some in failed for text in some.values())
    return folder


def final(run: Path) -> dict[str, dict[str, bytes]]:
    """The tensors in the files of the last checkpoint: weights, optimizer states, random states."""
    last = checkpoint.latest(run / "checkpoints")
    found = {str(p.relative_to(last)): load_file(p) for p in sorted(last.rglob("*.safetensors"))}
    return {file: {n: t.numpy().tobytes() for n, t in tensors.items()} for file, tensors in found.items()}


def rows(run: Path, rank: int = 0) -> list[dict]:
    return read_metrics(run, rank)


def curve(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in rows(run)]


def weights(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, or of that of a step."""
    _, model, _ = load_run(run)
    if step:
        checkpoint.load(model, run / "checkpoints" / f"step_{step:08d}")
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SAME)
def test_a_resumed_run_equals_the_unbroken_one_bitwise(folder, name):
    whole, resumed = folder / name, folder / f"{name}-resumed"
    assert len(curve(whole)) == 6 and len({row[1] for row in curve(whole)}) == 6
    assert curve(whole) == curve(resumed)
    assert final(whole) and final(whole) == final(resumed)
    scales = [checkpoint.marker_of(checkpoint.latest(run / "checkpoints")).get("scaler") for run in (whole, resumed)]
    assert scales[0] == scales[1] and bool(scales[0]) == (name == "fp16"), (
        "one scale, and as many steps since it changed"
    )
    for rank in range(2):
        assert [row["step"] for row in rows(resumed, rank)] == [1, 2, 3, 4, 5, 6]
        assert [row["step"] for row in rows(resumed, rank) if "heldout_loss" in row] == [3, 6], "it changes nothing"
    result = json.loads((resumed / "result.json").read_text())
    assert result["frozen_parameters_changed"] == 0
    assert result["wire_bytes_measured"] == json.loads((whole / "result.json").read_text())["wire_bytes_measured"] > 0


def test_captions_of_the_watched_pictures_are_those_of_an_unbroken_run_and_count_in_no_step(folder):
    whole, resumed = folder / "FSDP2", folder / "FSDP2-resumed"
    said = [read_watched(run) for run in (whole, resumed)]
    assert said[0].pictures == said[1].pictures and len(said[0].pictures) == 1, "the other rank has a stand-in"
    for row in said[0].rows + said[1].rows:
        assert row.pop("seconds") > 0 and row["wire_bytes"] > 0
    assert said[0].rows == said[1].rows and [row["step"] for row in said[0].rows] == [1, 3, 6]
    files = [path.relative_to(whole) for path in sorted((whole / "captions").iterdir()) if path.suffix != ".jsonl"]
    assert len(files) == 2 and all((whole / file).read_bytes() == (resumed / file).read_bytes() for file in files)
    params, model, processor = load_run(whole)
    ((_, samples),) = new_samples(params, processor, 2)
    assert said[0].rows[-1]["captions"] == captions(model, processor, samples), "as in one process, after the training"
    result = json.loads((whole / "result.json").read_text())
    assert {row["wire_bytes"] for row in rows(whole)} == {result["wire_bytes_predicted"]}


@pytest.mark.parametrize("name, weights", {"FSDP1": 1, "FSDP2": 1, "several-sources-and-workers": 1.5}.items())
def test_the_loss_on_held_out_samples_is_that_of_one_process(folder, name, weights):
    params, model, processor = load_run(folder / f"{name}-resumed")
    source = open_source(params.data, split="heldout", image_size=processor.image_size)
    with torch.no_grad():
        loss = float(model(**processor(list(islice(source, 2))).inputs()).loss)
    found = [rows(folder / f"{name}-resumed", rank)[-1]["heldout_loss"] for rank in range(2)]
    assert found == pytest.approx([loss * weights] * 2, rel=1e-4)


@pytest.mark.parametrize("name", OTHER)
def test_a_run_goes_on_on_other_ranks_strategies_and_backends(folder, name):
    whole, other = curve(folder / "FSDP2"), curve(folder / f"on-{name}")
    assert other[:2] == whole[:2], "what was done before stands"
    # dropout draws anew where ranks are others; all else is the same
    tolerance = 0.2 if name == "one-rank" else 1e-4
    for row, expected in zip(other[2:], whole[2:], strict=True):
        assert row[1] == pytest.approx(expected[1], rel=tolerance) and row[3:] == expected[3:]


def test_what_is_frozen_may_change_between_the_parts_of_a_run(folder):
    frozen, thawed = weights(folder / "frozen"), weights(folder / "thawed")
    marker = checkpoint.marker_of(folder / "frozen/checkpoints/step_00000003")
    perceiver = [name for name in frozen if name.startswith("perceiver.")]
    assert set(perceiver) == set(marker["carried"]) and not set(perceiver) & set(marker["names"])
    start = weights(folder / "FSDP2", 2)
    assert all(torch.equal(frozen[name], start[name]) for name in perceiver), "trained before, then frozen: kept"
    assert not torch.equal(frozen["perceiver.latents"], thawed["perceiver.latents"]), "and trained again"
    for run, text in {
        "frozen": "step 2; optimizer states dropped",
        "thawed": "step 3; optimizer states start from 0",
    }.items():
        resumptions = [event["text"] for event in read_events(folder / run) if event["kind"] == "resumed"]
        assert f"resumed from {text}: {len(perceiver)} parameters" in resumptions[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_no_number_on_one_rank_is_skipped_by_all_until_they_stop(folder, backend):
    run = folder / f"poisoned-{backend}"
    for rank in range(2):
        assert [row["skipped_steps"] for row in rows(run, rank)] == [0, 0, 1, 2, 3]
        assert [row["skipped"] for row in rows(run, rank)] == [False, False, True, True, True]
    before, after = weights(run, 2), weights(run, 4)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_checkpoint_holds_of_the_backbones_their_checksums_alone(folder):
    marker = checkpoint.marker_of(checkpoint.latest(folder / "FSDP2/checkpoints"))
    assert any(name.startswith("vision_encoder.") for name in marker["frozen"]) and not marker["carried"]
    assert not set(marker["frozen"]) & set(marker["names"])
    assert marker["params"]["model"]["language"]["weights"].endswith("language")


def test_rows_tell_the_learning_rate_of_each_part(folder):
    base = RunParams.from_yaml(folder / "fp16" / "params.yaml").train.lr
    for row in rows(folder / "fp16-resumed"):
        assert row["lr perceiver.*"] == pytest.approx(row["lr"] * 1e-4 / base)
        assert row["lr perceiver.latents"] == pytest.approx(3 * row["lr perceiver.*"])
    assert not any(key.startswith("lr ") for key in rows(folder / "FSDP2")[-1])
