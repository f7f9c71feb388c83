"""`verify` finds eight planted mistakes, each by the check that is for it, and none where there is none."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from mmfsdp import RunParams, loss_in_head, loss_positions, verify
from mmfsdp.kit import cli
from mmfsdp.kit.models.build import build_model
from mmfsdp.kit.verify.forward_checks import check_head_loss
from mmfsdp.kit.verify.from_params import check_memory, verify_folder, write_trial
from mmfsdp.kit.verify.lines import Line, from_plain
from mmfsdp.kit.verify.outcome import first_result, lines_from_ranks
from mmfsdp.kit.verify.own_loop import TIMEOUT_S
from mmfsdp.kit.verify.shallow import trial_params
from mmfsdp.params import ParamError, load
from tests import families
from tests.cover import kept
from tests.ranks import on_ranks
from tests.test_docs import blocks

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "tests/files/own"
PLANTED = {
    "": None,
    "detached branch": ("trained", "the loss depends on side.*, which get no gradient"),
    "sum": ("loss", "a sum: batches with"),
    "untied head": ("ties", "the configuration ties the embedding and the head of language"),
    "encoder under no_grad": ("trained", "the loss depends on vision.*, which get no gradient"),
    "detached in part": ("derivatives", "a part of the gradient is missing in vision"),
    "buffer on rank 0": ("same code", "batch 0 has the loss"),
    "skips the encoder": ("no picture", "a batch without a picture does not enter projector, vision"),
}
"""By the mistake: the check that finds it, and the beginning of its words."""
LOOPS = {
    "right": None,
    "wrap_in_bf16": None,
    "optimizer_of_all": ("optimizer", "it holds frozen parameters: encoder.*"),
    "step_with_early_evaluation": ("evaluation", "a forward without a backward came before optimizer.step()"),
    "step_with_local_norm": ("norm", "each rank clips by a norm of its own"),
    "build_unseeded": ("weights", "ranks start from different weights in head.weight"),
    "without a picture": ("no picture", "a batch without a picture does not enter encoder, projector"),
}
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.13
    reduces = "without a picture no gradient arrives at projector.*: ranks with a picture reduce more than the others; "
    LOOPS["torch's switch"] = ("no picture", f"{reduces}set_reduce_scatter_unused_params(True), which is set here")
PRESETS = ("tiny", "tiny_llava")
NARROW = yaml.safe_load((ROOT / "tests/files/narrow_presets.yaml").read_text())
FAMILIES = ("llava", "qwen2_5_vl", "gemma3")


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """The modules of tests/files/own can be imported."""
    monkeypatch.syspath_prepend(OWN)


def planted(mistake: str, **changes):
    return load("tiny").change(**{"model.build": {"call": "planted:build", "mistake": mistake}}, **changes)


def all_on_ranks(folders: dict[str, str]) -> dict[str, list]:
    """Verify each folder's configuration, each loop of own_loops.py, and models of transformers, as one rank."""
    sys.path.insert(0, str(OWN))
    found = {name: first_result([verify_folder(folder)]) for name, folder in folders.items()}
    for name in LOOPS:
        found[name] = [vars(line) for line in verify_loop(name).lines]
    for name in FAMILIES:
        found[name] = [vars(line) for line in verify_family(name).lines]
    return found


def verify_loop(name: str):
    import own_loops as own

    arguments = {"wrap": own.wrap, "optimizer": own.optimizer, "step": own.step}
    arguments["batches"] = [own.batch(0), own.batch(1)]
    model = own.build
    if name == "build_unseeded":
        model = own.build_unseeded
    elif name == "without a picture":
        arguments["without_picture"] = own.batch(1, pictures=False)
    elif name == "torch's switch":
        arguments |= {"wrap": own.wrap_with_switch, "without_picture": own.batch(1, pictures=False)}
    elif name != "right":
        arguments[name.partition("_")[0]] = getattr(own, name)
    return verify(model, **arguments)


def verify_family(name: str):
    def wrap(model):
        for layer in model.get_decoder().layers:
            fully_shard(layer)
        fully_shard(model)

    def step(model, optimizer, batch):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"norm": norm}

    def optimizer(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    batches = [families.Inputs(name, seed).inputs() for seed in range(2)]
    for batch in batches:
        batch["loss_positions"] = loss_positions(batch["labels"])
    model = families.build(name)
    assert loss_in_head(model) == ""
    return verify(model, wrap=wrap, optimizer=optimizer, step=step, batches=batches)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The lines of each, by name: one start of two ranks for all."""
    folders = {}
    sys.path.insert(0, str(OWN))
    for mistake in PLANTED:
        folder = tmp_path_factory.mktemp("planted")
        write_trial(planted(mistake), folder)
        folders[mistake] = str(folder)
    for name in PRESETS:
        folders[name] = str(tmp_path_factory.mktemp(name))
        write_trial(load(name), Path(folders[name]))
    sys.path.remove(str(OWN))
    return {name: from_plain(lines) for name, lines in on_ranks(all_on_ranks, 2, folders)[0].items()}


def check_found(lines: list[Line], expected: tuple[str, str] | None) -> None:
    wrong = {line.code: line.message for line in lines if line.level == "wrong"}
    if expected is None:
        assert not wrong, "\n".join(map(str, lines))
        return
    check, words = expected
    assert wrong.pop(check, "").startswith(words), "\n".join(map(str, lines))
    fix = next(line.fix for line in lines if line.code == check)
    assert fix, "it says what to do"


def test_a_head_that_computes_another_loss_than_whole_logits_is_found():
    def build(in_head=True):
        model = families.build("llava")
        assert not in_head or loss_in_head(model) == ""
        return model

    def line_of(batch, **changes):
        return check_head_loss(SimpleNamespace(loop=SimpleNamespace(build=partial(build, **changes)), batch=batch))

    inputs = families.Inputs("llava").inputs()
    others = loss_positions(torch.roll(inputs["labels"], 5, dims=1))[:1]
    assert line_of(inputs).level == "ok"
    assert line_of({**inputs, "loss_positions": loss_positions(inputs["labels"])}).level == "ok"
    assert line_of({**inputs, "loss_positions": others}).level == "wrong"
    assert line_of(inputs, in_head=False) is None


@pytest.mark.real
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_in_a_configured_model_is_found(found, mistake):
    check_found(found[mistake], PLANTED[mistake])


@pytest.mark.real
@pytest.mark.parametrize("name", LOOPS)
def test_a_mistake_in_a_loop_of_ones_own_is_found(found, name):
    check_found(found[name], LOOPS[name])


@pytest.mark.real
@pytest.mark.parametrize("name", [*PRESETS, *FAMILIES])
def test_nothing_is_found_in_presets_and_models_of_transformers(found, name):
    check_found(found[name], None)
    assert {line.code for line in found[name]} >= {"gradients", "norm", "evaluation", "frozen"}


@pytest.mark.real
def test_the_command_checks_a_resume_and_an_export_too_and_ends_with_1_for_a_fault(tmp_path, monkeypatch, capsys):
    planted("untied head").to_yaml(tmp_path / "my.yaml")
    (tmp_path / "planted.py").write_text((OWN / "planted.py").read_text())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", "--config", "my.yaml"]) == 1
    lines = capsys.readouterr().out.splitlines()
    begins = [" ".join(line.split()[:2]) for line in lines if not line.startswith(" ")]
    assert [line for line in begins if line.startswith("wrong")] == ["wrong ties:"]
    assert begins[-2:] == ["ok resume:", "ok export:"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "planted.py"], "nothing is left behind"


@pytest.mark.real
def test_the_loop_of_the_page_is_verified_on_two_ranks_that_verify_starts(tmp_path, monkeypatch, capsys):
    [script] = blocks(ROOT / "notebooks/reference/verify.md", "python")
    (tmp_path / "my_loop.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    import my_loop

    batches = [{"x": torch.randn(4, 8)}, {"x": torch.randn(4, 8)}]
    report = verify(my_loop.build, wrap=my_loop.wrap, optimizer=my_loop.optimizer, step=my_loop.step, batches=batches)
    assert report.ok and str(report) in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.parametrize("name", kept({name: [load(name).model.kind] for name in NARROW}))
def test_nothing_is_found_in_any_preset(name, tmp_path, monkeypatch):
    """Made shallow, as `verify` does, and narrow, for two cores; offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = load(name).to_dict()
    write_trial(RunParams.from_dict(merged(values, {"model": NARROW[name]})), tmp_path)
    check_found(lines_from_ranks(verify_folder, str(tmp_path), timeout_s=TIMEOUT_S), None)


def merged(values: dict, changes: dict) -> dict:
    """Return values with changes at any depth."""
    result = dict(values)
    for key, change in changes.items():
        result[key] = merged(result.get(key, {}), change) if isinstance(change, dict) else change
    return result


@pytest.mark.parametrize("name", ["llama_3_2_11b_vision", "openflamingo_9b"])
def test_a_model_of_many_layers_is_tried_with_two_in_each_part(name, tmp_path):
    model, _ = build_model(trial_params(load(name), tmp_path).model, meta=True)
    lengths = [len(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    assert max(lengths) == 2, lengths


def test_a_model_that_needs_more_memory_than_is_free_is_refused():
    model = nn.Linear(1000, 1000)
    check_memory(model, available=17_000_000)
    with pytest.raises(ParamError, match="model: has 1 M parameters in few layers, .* reduce hidden_size and"):
        check_memory(model, available=15_000_000)


def test_arguments_that_cannot_be_used_are_named():
    import own_loops as own

    arguments = {"wrap": own.wrap, "optimizer": own.optimizer, "step": own.step}
    with pytest.raises(ParamError, match="batches: has 1; give 2, one for each rank"):
        verify(own.build, **arguments, batches=[own.batch(0)])
    with pytest.raises(ParamError, match="step: cannot be sent to other processes .*; make it a function of a module"):
        verify(own.build, **arguments | {"step": lambda *_: None}, batches=[own.batch(0), own.batch(1)])
