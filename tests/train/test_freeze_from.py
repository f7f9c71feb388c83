"""Other parameters are frozen from a step on: as by hand, bitwise, on two ranks; planned and shown phase by phase."""

import json
import shutil
from pathlib import Path

import pytest

from mmfsdp import checkpoint
from mmfsdp.checkpoint.steps import complete_checkpoints, drop_after
from mmfsdp.core.plan import WrapPlan
from mmfsdp.kit.cli import main
from mmfsdp.kit.run.files.folder import read_events, read_json, write_json
from mmfsdp.kit.run.files.plan_file import planned_after, plans_by_begin
from mmfsdp.kit.run.trust import trust_run
from mmfsdp.kit.train.evaluate import load_run
from mmfsdp.kit.train.handed_plan import RunPlan, take_plan
from mmfsdp.kit.train.prepare import frozen_model, prepare
from mmfsdp.kit.widgets.report import report_html
from mmfsdp.params import ParamError, RunParams
from mmfsdp.params.phases import next_phase, phase_of_step, phases_of
from tests.ranks import fake_group, in_processes
from tests.tiny_run import free_port, tiny_run, train_as_rank
from tests.train.test_resume import curve, final, rows

FIRST = ["vision_encoder.*", "language_model.*", "!*cross_attention*"]
LAYER = "language_model.transformer.h.1.decoder_layer.mlp.c_fc.weight"
UNFROZEN = [*FIRST, "!*h.1.decoder_layer*"]
"""From step 4 on a layer of the language model trains, too."""
LAST = [*FIRST, "perceiver.*"]
"""From step 6 on it is frozen again, as it was trained, and so is the perceiver."""
BASE = {"model.freeze": FIRST, "train.schedule": "constant"}
RUNS = {
    "FSDP2": {"train.freeze_from": {3: UNFROZEN, 5: LAST}, "train.ema": 0.5, "train.lr_for": {"*h.1.decoder*": 1e-3}},
    "FSDP1": {"train.freeze_from": {3: UNFROZEN}, "fsdp.backend": "FSDP1"},
    "DDP": {"train.freeze_from": {3: UNFROZEN}, "fsdp.backend": "DDP"},
}
RESUMED_AT = {"FSDP2": (2, 4), "FSDP1": (4,), "DDP": (4,)}


def by_hand(params: RunParams) -> list[tuple[int, RunParams]]:
    """The parameters with which a person would resume at each step, one freeze after the other."""
    stages = []
    for phase in phases_of(params)[1:]:
        changes = {"train.freeze_from": {}, "train.steps": phase.end}
        if phase.begin == 5:  # the pattern of a learning rate is an error where it decides on nothing
            changes["train.lr_for"] = {}
        stages.append((phase.begin, phase.params.change(**changes)))
    return stages


def runs_of_two_ranks(rank: int, _: str, folder: str, ports: list[int]) -> dict[str, str]:
    """Each run; by hand from its first phase on; and resumed. Returns what failed."""
    ports, failed = iter(ports), {}

    def go(name: str, params: RunParams, after: str, step: int) -> None:
        start = Path(folder, after) if after else None
        error = train_as_rank(rank, Path(folder, name), lambda: params, port=next(ports), after=start, step=step)
        if error:
            failed[name] = error

    base = tiny_run(Path(folder)).change(**BASE)
    for name, changes in RUNS.items():
        params = base.change(**changes)
        go(name, params, "", 0)
        before = name
        for begin, stage in by_hand(params):
            go(f"{name}-by-hand-{begin}", stage, before, begin)
            before = f"{name}-by-hand-{begin}"
        for step in RESUMED_AT[name]:
            go(f"{name}-resumed-{step}", params, name, step)
    return failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    tiny_run(folder)
    failed = in_processes(runs_of_two_ranks, 2, str(folder), [free_port() for _ in range(20)])
    assert failed == [{}, {}], "\n".join(text for some in failed for text in some.values())
    return folder


@pytest.mark.real
@pytest.mark.parametrize("name", RUNS)
def test_a_phase_is_as_saving_and_resuming_with_another_freeze_by_hand(folder, name):
    last = max(RUNS[name]["train.freeze_from"])
    assert len({row[1] for row in curve(folder / name)}) == 6
    assert curve(folder / name) == curve(folder / f"{name}-by-hand-{last}")
    assert final(folder / name) == final(folder / f"{name}-by-hand-{last}")


def by_name(run: Path) -> dict[str, list[bytes]]:
    """The parts of each tensor of the last checkpoint. DDP's ranks share the whole tensors among their files as they
    like, by the order in which the optimizer has made its states."""
    parts: dict[str, list[bytes]] = {}
    for tensors in final(run).values():
        for name, content in tensors.items():
            parts.setdefault(name, []).append(content)
    return parts


@pytest.mark.real
@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in RESUMED_AT.items() for step in steps])
def test_it_resumes_to_the_last_bit_before_and_after_the_change(folder, name, step):
    resumed = folder / f"{name}-resumed-{step}"
    begins = [(event["kind"], event["step"]) for event in read_events(resumed) if event["kind"] in ("phase", "resumed")]
    later = [begin for begin in RUNS[name]["train.freeze_from"] if begin >= step]
    assert begins[begins.index(("resumed", step)) :] == [("resumed", step), *(("phase", begin) for begin in later)]
    assert curve(folder / name) == curve(resumed)
    assert by_name(folder / name) == by_name(resumed)


@pytest.mark.real
def test_what_trains_is_what_the_phase_says(folder):
    marker_at = {}
    for path in complete_checkpoints(folder / "FSDP2" / "checkpoints"):
        marker_at[int(path.name[-8:])] = checkpoint.marker_of(path)
    assert sorted(marker_at) == [2, 3, 4, 5, 6], "the last step of each phase is saved"
    trains = {step: LAYER in marker["names"] for step, marker in marker_at.items()}
    assert trains == {2: False, 3: False, 4: True, 5: True, 6: False}
    assert LAYER in marker_at[6]["carried"] and "perceiver.latents" in marker_at[6]["carried"]
    result = read_json(folder / "FSDP2" / "result.json")
    assert result["frozen_parameters_changed"] == 0


@pytest.mark.real
@pytest.mark.parametrize("name", RUNS)
def test_each_phase_sends_what_its_plan_predicts(folder, name):
    plans = plans_by_begin(read_json(folder / name / "plan.json"))
    assert list(plans) == [0, *RUNS[name]["train.freeze_from"]]
    sent = {}
    for row in rows(folder / name)[2::3]:  # DDP's first step after wrapping also agrees on its buckets
        predicted = planned_after(read_json(folder / name / "plan.json"), row["step"] - 1)["estimate"]["wire_bytes"]
        assert row["wire_bytes"] == predicted
        sent[row["step"]] = predicted
    assert sent[3] != sent[6]


@pytest.mark.real
def test_the_report_shows_each_phase(folder):
    html = report_html(folder / "FSDP2")
    assert html.count("<h3>From step ") == 3
    assert "parameters train, from step 4 on " in html
    plans = plans_by_begin(read_json(folder / "FSDP2" / "plan.json"))
    assert html.count("sent in a step: ") == 2, "the last phase has a table"
    assert "cannot be shown" not in html and len(plans) == 3


@pytest.mark.real
def test_a_checkpoint_is_loaded_as_its_phase_has_frozen(folder, tmp_path):
    for step, trains in {3: False, 5: True}.items():
        copy = tmp_path / str(step)
        shutil.copytree(folder / "FSDP2", copy)
        drop_after(copy / "checkpoints", step)
        trust_run(copy)
        params, model, _ = load_run(copy)
        assert model.get_parameter(LAYER).requires_grad == trains
        assert params.model.freeze == phase_of_step(params, step).params.model.freeze


def params_of(tmp_path: Path, **changes) -> RunParams:
    return tiny_run(tmp_path).change(**BASE, **{"train.freeze_from": {3: UNFROZEN}, "launch.ranks": 2, **changes})


def test_every_phase_is_planned_before_a_rank_starts_and_handed_to_the_ranks(tmp_path):
    params = params_of(tmp_path)
    prepared = prepare(params)
    assert prepared.params.train.freeze_from == {3: tuple(UNFROZEN)} and prepared.params.model.freeze == tuple(FIRST)
    (later,) = prepared.later.values()
    assert LAYER in later.plan.by_name and later.plan.by_name[LAYER].trainable
    assert not prepared.plan.by_name[LAYER].trainable
    write_json(tmp_path / "plan.json", prepared.to_dict())
    with fake_group(2):
        for phase in phases_of(prepared.params):
            model, _ = frozen_model(phase.params.model)
            taken = take_plan(tmp_path, phase.params, model, begin=phase.begin)
            assert isinstance(taken, RunPlan), taken
            assert taken.plan.by_name[LAYER].trainable == bool(phase.begin)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.freeze_from": {3: ["nothing.*"]}},
            r"train.freeze_from.3: from step 4 on, freeze: 'nothing.\*' matches no",
        ),
        (
            {"train.lr_for": {"vision_encoder.*": 1e-3}},
            r"train.lr_for: 'vision_encoder.\*' matches nothing that trains in",
        ),
        (
            {"data.feature_cache": "cache", "data.augment": False, "train.freeze_from": {3: ["language_model.*"]}},
            "train.freeze_from.3: from step 4 on, data.feature_cache: the vision encoder trains",
        ),
        ({"train.freeze_from": {6: FIRST}}, "train.freeze_from.6: the run ends after step 6"),
        ({"train.freeze_from": {3: ["lora"]}}, "train.freeze_from.3: 'lora' needs LoRA"),
        (
            {"fsdp.backend": "FSDP1", "fsdp.state_dict_type": "LOCAL_STATE_DICT"},
            "train.freeze_from.3: a LOCAL_STATE_DICT cannot be loaded once other parameters train",
        ),
    ],
)
def test_a_phase_that_cannot_be_is_told_before_any_rank(tmp_path, changes, message):
    with pytest.raises(ParamError, match=message):
        prepare(params_of(tmp_path, **changes))


def test_a_learning_rate_may_be_for_what_trains_later(tmp_path):
    prepared = prepare(params_of(tmp_path, **{"train.lr_for": {"*h.1.decoder*": 1e-3}}))
    assert "h.1.decoder" not in prepared.rates and "h.1.decoder" in prepared.later[3].rates


def test_steps_are_counted_alike_everywhere(tmp_path):
    params = params_of(tmp_path, **{"train.freeze_from": {"5": LAST, "3": UNFROZEN}})
    assert RunParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert [(phase.begin, phase.end) for phase in phases_of(params)] == [(0, 3), (3, 5), (5, 6)]
    assert next_phase(params, 3).begin == 3, "the step after 3 steps is the second phase's"
    assert phase_of_step(params, 3).begin == 0, "and the third step is the first phase's"
    assert next_phase(params, 6).begin == 5


def test_plan_prints_each_phase(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    params_of(tmp_path).to_yaml(path)
    assert main(["plan", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("steps 1 to 3:") and "\nsteps 4 to 6:" in text
    assert WrapPlan.from_dict(prepare(params_of(tmp_path)).to_dict()["plan"])
