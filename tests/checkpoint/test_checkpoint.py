"""Checkpoints: what real ranks save, one process loads, bit for bit; half-written ones do not count."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from mmfsdp import checkpoint
from mmfsdp.checkpoint.steps import complete_checkpoints
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, ParamError, StateDictType, TrainParams
from mmfsdp.planning import wrap_fsdp
from tests.ranks import on_ranks
from tests.tiny import tiny_batch, tiny_flamingo

CASES = {
    f"{backend}-{kind}": {"backend": backend, "state_dict_type": kind}
    for backend in ("DDP", "FSDP1", "FSDP2")
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
} | {"FSDP2-replicated-tied": {"backend": "FSDP2", "frozen_policy": "REPLICATE", "tied": True}}


def save_and_answer(fields: dict, folder: str) -> float:
    """Train two steps, saving after each; the loss of the result on a batch of its own."""
    fields = dict(fields)
    model = wrap_fsdp(tiny_flamingo(tied=fields.pop("tied", False)), fsdp := FSDPParams(**fields))
    optimizer, _ = build_optimizer(model, TrainParams(lr=1e-2))
    for step in (1, 2):
        train_step(model, [tiny_batch(seed=dist.get_rank() + step)], optimizer)
        checkpoint.save(Path(folder), model=model, step=step, kind=fsdp.state_dict_type, keep_last=1)
    with torch.no_grad():
        return model(**tiny_batch(seed=9).inputs()).loss.item()


RESUMED = {
    "DDP": {"backend": "DDP"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 flat": {"backend": "FSDP1", "use_orig_params": False},
    "FSDP1 local": {"backend": "FSDP1", "state_dict_type": "LOCAL_STATE_DICT"},
    "FSDP2": {"backend": "FSDP2"},
}


def with_schedule(fields: dict) -> tuple[nn.Module, torch.optim.Optimizer, OneCycleLR]:
    """A wrapped model with an optimizer of two groups and one without parameters, and a schedule of rates and betas."""
    model = wrap_fsdp(tiny_flamingo(), FSDPParams(**fields))
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[:3]}, {"params": []}, {"params": trainable[3:], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, OneCycleLR(optimizer, max_lr=[0.02, 0.03, 0.01], total_steps=6)


def resumed_and_unbroken(fields: dict, folder: Path) -> list:
    """The rates, betas and loss of each step after a checkpoint: of the run that saved it, and of one that resumed."""
    curves: list[list] = []
    for is_resumed in (False, True):
        model, optimizer, schedule = with_schedule(fields)
        first = 0
        if is_resumed:
            checkpoint.resume(model, optimizer, folder / "step_00000003", schedule=schedule)
            first = 3
        curve = []
        for step in range(first, 6):
            settings = [[group[key] for key in ("lr", "betas", "weight_decay")] for group in optimizer.param_groups]
            metrics = train_step(model, [tiny_batch(seed=step)], optimizer, schedule=schedule if step < 5 else None)
            curve.append([settings, metrics.loss, metrics.grad_norm])
            if step == 2:
                kind = FSDPParams(**fields).state_dict_type
                checkpoint.save(folder, model=model, optimizer=optimizer, schedule=schedule, step=3, kind=kind)
        curves.append(curve[-3:])
    return curves


def all_cases(folder: str) -> dict:
    answers: dict = {name: save_and_answer(fields, f"{folder}/{name}") for name, fields in CASES.items()}
    resumed = Path(folder, "resumed")
    answers["resumed"] = {name: resumed_and_unbroken(fields, resumed / name) for name, fields in RESUMED.items()}
    return answers


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, on_ranks(all_cases, 2, str(folder))


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_one_process_loads_what_ranks_saved(saved, name):
    folder, answers = saved
    newest = checkpoint.latest(folder / name)
    assert [p.name for p in complete_checkpoints(folder / name)] == ["step_00000002"], "keep_last keeps the newest"
    model = tiny_flamingo(tied=CASES[name].get("tied", False))
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}  # not in a checkpoint
    for p in model.parameters():
        p.data.add_(1.0) if p.requires_grad else None
    marker = checkpoint.load(model, newest)
    assert marker["step"] == 2 and set(marker["names"]) == {n for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        loss = model(**tiny_batch(seed=9).inputs()).loss.item()
    assert loss == pytest.approx(answers[0][name], rel=1e-6) and loss == pytest.approx(answers[1][name], rel=1e-6)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


@pytest.mark.real
@pytest.mark.parametrize("name", RESUMED)
def test_ranks_that_resume_have_the_settings_and_losses_of_the_unbroken_run(saved, name):
    for answers in saved[1]:
        unbroken, resumed = answers["resumed"][name]
        assert len({step[0][0][0] for step in unbroken}) == 3, "the rates change"
        assert resumed == unbroken


def test_another_model_is_refused_by_parameter_name(tmp_path):
    model = tiny_flamingo()
    path = checkpoint.save(tmp_path, model=model, step=1, kind=StateDictType.FULL_STATE_DICT)
    model.perceiver.latents.requires_grad_(False)
    with pytest.raises(ParamError, match="perceiver.latents"):
        checkpoint.load(model, path)
    assert not list(path.glob("*.pt")) and json.loads((path / "complete.json").read_text())["step"] == 1


def trained(width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", StateDictType)
def test_a_run_is_resumed_though_a_parameter_had_no_gradient_yet(tmp_path, kind):
    """As the last layers of an encoder of which an earlier layer's output is used: their optimizer has no states."""

    def new() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.ModuleDict, optimizer: torch.optim.Optimizer, *parts: str) -> None:
        sum(model[part](torch.ones(1, 4)).square().sum() for part in parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = new()
    step(model, optimizer, "used")
    path = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1, kind=kind)
    resumed, resumed_optimizer = new()
    checkpoint.resume(resumed, resumed_optimizer, path)
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        step(*each, "used")
        step(*each, "used", "unused")  # now it has one
    for (name, p), q in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("kind", StateDictType)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_offered(tmp_path, kind):
    model, optimizer = trained()
    for step in (1, 2):
        path = checkpoint.save(tmp_path, model=model, step=step, optimizer=optimizer, kind=kind)
    files = sorted(path.rglob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        whole = file.read_bytes()
        cut, altered, longer = whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"x"
        for damage in (cut, altered, longer, b"x" + whole[1:], b"", b"junk" * 1000, "missing", "folder"):
            file.unlink(missing_ok=True)
            if damage == "folder":
                file.mkdir()
            elif damage != "missing":
                file.write_bytes(damage)
            named = f"{file.name} is missing, .* step_00000001.*--step 1"
            with pytest.raises(checkpoint.DamagedCheckpoint, match=named) as error:
                checkpoint.resume(*trained(), path)
            assert "\n" not in str(error.value)
            with pytest.raises(checkpoint.DamagedCheckpoint, match=named):
                checkpoint.load(model, path)
        file.rmdir()
        file.write_bytes(whole)
    nn.init.zeros_(model[1].weight)
    checkpoint.resume(model, optimizer, path)
    assert torch.equal(model[1].weight, trained()[0][1].weight) and checkpoint.load(model, path)["step"] == 2
    with pytest.raises(ParamError, match=r"checkpoint: .*1\.(weight|bias)"):
        checkpoint.load(trained(width=3)[0], path)
    marker = path / "complete.json"
    text = marker.read_text()
    for damaged in (text[:-5], "{}", "[]"):
        marker.write_text(damaged)
        with pytest.raises(checkpoint.DamagedCheckpoint, match="complete.json"):
            checkpoint.load(model, path)


def test_each_flipped_bit_of_a_marker_is_found_and_one_without_a_checksum_is_refused(tmp_path):
    model, optimizer = trained()
    path = checkpoint.save(tmp_path, model=model, step=1, optimizer=optimizer, record={"data": {"position": 7}})
    marker = path / "complete.json"
    whole, values = marker.read_bytes(), checkpoint.marker_of(path)
    assert values["data"] == {"position": 7} and json.loads(whole) == values
    unnoticed = []
    for bit in range(0, 8 * len(whole), 3):  # each byte, and each place of a bit
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        marker.write_bytes(damaged)
        try:
            checkpoint.marker_of(path)
            unnoticed.append(bit)
        except checkpoint.DamagedCheckpoint:
            continue
    assert not unnoticed
    del values["sha256"]
    marker.write_text(json.dumps(values))
    with pytest.raises(checkpoint.DamagedCheckpoint):
        checkpoint.load(model, path)


def test_what_a_broken_save_left_behind_hinders_no_other(tmp_path):
    model = tiny_flamingo()
    good = checkpoint.save(tmp_path, model=model, step=3)
    for name in (
        ".step_00000004.writing/optimizer",
        ".step_00000003.old/ranks",
        "step_00000004/ranks",
        "dropped_step_1",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step_00000005").write_text("a file")
    (tmp_path / ".step_00000006.writing").write_text("a file")
    assert checkpoint.latest(tmp_path) == good, "one that is half written does not count"
    with pytest.raises(ParamError, match="holds no complete checkpoint"):
        checkpoint.latest(tmp_path / "nothing")
    for step in (4, 5, 6):
        assert checkpoint.save(tmp_path, model=model, step=step, keep_last=2).name == f"step_0000000{step}"
        assert checkpoint.load(model, checkpoint.latest(tmp_path))["step"] == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dropped_step_1", "step_00000005", "step_00000006"]


def test_nothing_in_a_checkpoint_is_pickled_and_nothing_of_ours_unpickles(tmp_path):
    path = checkpoint.save(tmp_path, model=tiny_flamingo(), step=1)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".safetensors", ".json"}
    for file in Path(checkpoint.__file__).parent.parent.rglob("*.py"):
        text = file.read_text()
        assert "import pickle" not in text and "pickle.load" not in text, file
        assert text.count("torch.load(") == text.count("weights_only=True"), file
