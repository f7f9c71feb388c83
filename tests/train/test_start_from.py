"""A run that starts from another one has its weights, with adapters kept or merged, as one would make them by hand."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mmfsdp import checkpoint
from mmfsdp.core.model_record import plan_of
from mmfsdp.kit.models.backbones import merge_lora
from mmfsdp.kit.run.files.folder import read_events, read_json
from mmfsdp.kit.run.trust import trust_run
from mmfsdp.kit.train.evaluate import load_run
from mmfsdp.kit.train.prepare import prepare
from mmfsdp.kit.train.start_from import without_base
from mmfsdp.kit.widgets.report import report_html
from mmfsdp.params import ParamError, RunParams
from tests.compat.test_export import MULTIMODAL
from tests.ranks import in_processes
from tests.tiny_run import free_port, tiny_run, train_as_rank
from tests.train.test_resume import final

PARENT = {**MULTIMODAL, "model.lora_rank": 2, "train.steps": 2, "train.lr": 0.1}
MERGE = {"train.start_adapters": "merge"}
CHILDREN = {
    "kept": {"model.freeze": ["*", "!*lora_*"], "fsdp.backend": "FSDP1"},
    "kept, all frozen but the projectors": {"model.freeze": ["*", "!projectors.*"], "fsdp.backend": "DDP"},
    "merged, FSDP2": {"model.lora_rank": None, "model.freeze": ["*", "!projectors.*"], **MERGE},
    "merged, FSDP1, into new adapters": {"model.lora_rank": 4, "fsdp.backend": "FSDP1", **MERGE},
    "merged, DDP": {"model.lora_rank": None, "model.freeze": [], "fsdp.backend": "DDP", **MERGE},
}
LORA = "lora_"


class Keep:
    """Writes the weights with which a training begins."""

    def on_train_begin(self, training):
        whole = {}
        for name in dict.fromkeys(p.name for p in plan_of(training.model).by_name.values()):
            whole[name] = training.parameter(name).contiguous()
        if dist.get_rank() == 0 and training.step == 0:
            save_file(whole, os.environ["BEGIN"])


def children_of(start: Path, base: RunParams) -> dict[str, RunParams]:
    callbacks = [f"{__name__}:Keep"]
    made = {}
    for name, changes in CHILDREN.items():
        more = {"train.start_from": str(start), "train.callbacks": callbacks, "train.steps": 3}
        made[name] = base.change(**{**PARENT, **changes, **more})
    return made


def runs_of_two_ranks(rank: int, _: str, folder: str, ports: list[int]) -> dict[str, str]:
    """The parent, its children, and one of them once more from its second step on. Returns what failed."""
    ports, failed = iter(ports), {}
    base = tiny_run(Path(folder))

    def go(name: str, params: RunParams, after: Path | None = None) -> None:
        os.environ["BEGIN"] = str(Path(folder, f"{name}.safetensors"))
        error = train_as_rank(rank, Path(folder, name), lambda: params, port=next(ports), after=after)
        if error:
            failed[name] = error

    go("parent", base.change(**PARENT))
    children = children_of(Path(folder, "parent"), base)
    for name, params in children.items():
        go(name, params)
    go("resumed", children["merged, FSDP2"], after=Path(folder, "merged, FSDP2"))
    return failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder)
    failed = in_processes(runs_of_two_ranks, 2, str(folder), [free_port() for _ in range(2 + len(CHILDREN))])
    assert failed == [{}, {}], "\n".join(text for some in failed for text in some.values())
    return folder


def by_hand(folder: Path, *, merged: bool) -> dict[str, torch.Tensor]:
    """The weights of the parent in one process."""
    _, model, _ = load_run(folder / "parent")
    if merged:
        merge_lora(model)
    return {without_base(name): p.detach() for name, p in model.named_parameters()}


@pytest.mark.real
@pytest.mark.parametrize("name", CHILDREN)
def test_a_stage_begins_with_the_weights_of_its_parent_as_by_hand(folder, name):
    wanted = by_hand(folder, merged="merged" in name)
    begin = {without_base(key): value for key, value in load_file(folder / f"{name}.safetensors").items()}
    if "new adapters" in name:
        assert any(LORA in key for key in begin)
        begin = {key: value for key, value in begin.items() if LORA not in key}
    assert begin.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(begin[key], value, rtol=1e-6, atol=1e-7), key
    parent = by_hand(folder, merged=False)
    changed = [key for key in begin if LORA not in key and not torch.equal(begin[key], parent[key])]
    assert bool(changed) == ("merged" in name), "merging changes matrices, and keeping changes none"


@pytest.mark.real
def test_a_stage_needs_its_parent_no_more_once_it_is_saved_and_resumes_bitwise(folder, tmp_path):
    assert final(folder / "resumed") == final(folder / "merged, FSDP2")
    shutil.copytree(folder / "merged, FSDP2", tmp_path / "alone")
    trust_run(tmp_path / "alone")
    wanted = by_hand(folder, merged=True)
    moved = folder.parent / "elsewhere"
    shutil.move(folder / "parent", moved)
    _, model, _ = load_run(tmp_path / "alone")
    shutil.move(moved, folder / "parent")
    weights = dict(model.named_parameters())
    assert weights.keys() == wanted.keys()
    frozen = [name for name in wanted if not name.startswith("projectors.")]
    assert all(torch.allclose(weights[name], wanted[name], rtol=1e-6, atol=1e-7) for name in frozen)
    assert any(not torch.allclose(weights[name], wanted[name]) for name in wanted if name not in frozen)


@pytest.mark.real
def test_result_events_and_report_name_the_parent(folder):
    for run in (folder / "merged, FSDP2", folder / "resumed"):
        words = read_json(run / "result.json")["began_with"]
        assert words.startswith(f"began with the weights of {folder / 'parent'}, step 2; adapters merged into ")
        assert read_events(run)[0]["text"] == words
        assert words in report_html(run)


@pytest.mark.real
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.lora_rank": None, "model.freeze": None},
            "set model.lora_rank and lora_targets as there, or train.sta",
        ),
        ({"model.lora_rank": 4}, r"lora_A.default.weight is \(2, \d+\) there, and \(4, \d+\) in this model"),
        ({"train.start_from": "nowhere"}, "train.start_from: .*holds no complete checkpoint"),
        ({**MERGE, "fsdp.frozen_dtype": "int8"}, "train.start_adapters: merge: .* is in codes"),
    ],
)
def test_what_does_not_fit_is_told_before_any_rank_starts(folder, changes, message):
    params = tiny_run(folder, **{**PARENT, "train.start_from": str(folder / "parent"), "launch.ranks": 2, **changes})
    with pytest.raises(ParamError, match=message):
        prepare(params)


def test_merging_needs_a_run():
    with pytest.raises(ParamError, match="train.start_adapters: merge has no effect without start_from"):
        RunParams().change(**MERGE)


@pytest.mark.real
def test_launch_from_a_run_takes_its_parameters(folder, capsys):
    from mmfsdp.kit.cli import build_parser
    from mmfsdp.kit.cli.flags import read_words
    from mmfsdp.kit.cli.running import stage_params

    words = ["launch", "--from", str(folder / "parent"), "--train.lr", "1e-3", "--model.freeze", "*", "!projectors.*"]
    params = stage_params(read_words(build_parser(), words))
    parent = RunParams.from_yaml(folder / "parent" / "params.yaml")
    assert params.train.start_from == str(folder / "parent")
    assert params.launch.name != parent.launch.name or not (Path(parent.launch.folder) / parent.launch.name).exists()
    assert (params.train.lr, params.train.steps) == (1e-3, parent.train.steps)
    assert params.model.change(freeze=None) == parent.model.change(freeze=None)
    assert checkpoint.latest(folder / "parent" / "checkpoints").name == "step_00000002"
