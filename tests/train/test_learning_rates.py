"""Learning rates by part: the last pattern that matches decides, and a pattern without an effect is an error."""

import pytest
from torch import nn

from mmfsdp import ParamError, RunParams
from mmfsdp.core.names import named_tensors
from mmfsdp.kit.cli import main
from mmfsdp.kit.train.learning_rates import rate_groups, spell_out_rates
from mmfsdp.kit.train.optimizer import build_optimizer, lr_factor
from mmfsdp.kit.train.prepare import frozen_model, prepare, preview, rates_of
from mmfsdp.kit.train.train_state import other_rates
from mmfsdp.params import TrainParams, load
from tests.families import FAMILIES


def changed(**rates: float) -> RunParams:
    return load("tiny").change(**{"train.lr": 1e-3, "train.lr_for": rates})


def rates(model, params: TrainParams) -> dict[str, float]:
    """The peak learning rate of each trainable parameter."""
    optimizer, schedule = build_optimizer(model, params)
    names = {p: names[0] for names, p in named_tensors(model)}
    peaks = {}
    for group, base in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
        assert group["lr"] == base * lr_factor(0, params)
        peaks |= {names[p]: base for p in group["params"]}
    return peaks


def test_the_last_pattern_that_matches_a_name_decides():
    model = nn.ModuleDict({"vision": nn.Linear(3, 3), "text": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    model["head"].weight = model["text"].weight
    model["vision"].bias.requires_grad_(False)
    params = TrainParams(lr=1e-3, lr_for={"vision.*": 1e-5, "*.bias": 2e-5, "head.weight": 3e-5})
    expected = {"vision.weight": 1e-5, "text.weight": 3e-5, "text.bias": 2e-5, "head.bias": 2e-5}
    assert rates(model, params) == expected
    assert set(rates(model, params.change(lr_for={})).values()) == {1e-3}


def test_the_first_group_has_the_rate_that_a_step_tells():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer, _ = build_optimizer(model, TrainParams(lr=1e-3, warmup_steps=0, lr_for={"0.*": 1e-5}))
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("percever.*", "'percever.*' matches no parameter"),
        ("vision_encoder.*", "'vision_encoder.*' matches only frozen parameters, such as vision_encoder."),
        ("vision", "'vision' matches no parameter"),
    ],
)
def test_a_pattern_without_an_effect_is_an_error_before_anything_starts(pattern, words, capsys):
    with pytest.raises(ParamError, match=f"^train.lr_for: {words.replace('*', '[*]')}") as error:
        prepare(changed(**{pattern: 1e-4}))
    assert main(["plan", "--config", "tiny", "--train.lr-for", f"{{{pattern}: 1e-4}}"]) == 2
    assert str(error.value)[:40] in capsys.readouterr().err


def test_a_pattern_that_later_ones_cover_is_an_error():
    with pytest.raises(ParamError, match="'perceiver.latents' has no effect, since later patterns match all"):
        preview(changed(**{"perceiver.latents": 1e-4, "perceiver.*": 1e-5}))
    with pytest.raises(ParamError, match=r"train.lr_for.perceiver.\*: 0.0 should be greater than 0"):
        changed(**{"perceiver.*": 0.0})


def test_a_flat_parameter_has_one_rate():
    flat = {"fsdp.backend": "FSDP1", "fsdp.use_orig_params": False, "fsdp.auto_wrap_policy": "FROZEN_AWARE"}
    whole = changed(**{"perceiver.*": 1e-4}).change(**flat)
    plan, _ = preview(whole)
    assert "0.0001 for perceiver.*" in rates_of(whole, plan)
    with pytest.raises(ParamError, match="is one flat parameter; set fsdp.use_orig_params to true"):
        preview(changed(**{"perceiver.latents": 1e-4}).change(**flat))


def test_the_plan_tells_the_rates(capsys):
    params = changed(**{"perceiver.*": 1e-4})
    plan, _ = preview(params)
    perceiver = [p for name, p in plan.by_name.items() if name.startswith("perceiver.")]
    others = [p for p in plan.params if p.trainable and p not in perceiver]
    line = rates_of(params, plan)
    assert line.startswith(f"learning rates: 0.001 for all others ({len(others)} parameters, ")
    assert f"0.0001 for perceiver.* ({len(perceiver)} parameters, " in line
    assert main(["plan", "--config", "tiny", "--train.lr", "1e-3", "--train.lr-for", "{perceiver.*: 1e-4}"]) == 0
    assert line in capsys.readouterr().out.replace("\n  ", " ")
    assert prepare(params).to_dict()["learning_rates"] == line


def test_parts_of_a_model_of_transformers_stand_for_their_parameters():
    model = {
        "kind": "transformers",
        "config": {**FAMILIES["gemma3"].config, "model_type": "gemma3"},
        "freeze": ["*", "!projector", "!language"],
    }
    params = RunParams(model=model).change(**{"train.lr_for": {"language": 1e-5, "projector": 2e-5}})
    plan, _ = preview(params)
    trained = {p.name for p in plan.params if p.trainable}
    groups = {
        group.pattern: group for group in rate_groups(plan, spell_out_rates(frozen_model(params.model)[0], params))
    }
    assert {name for group in groups.values() for name in group.names} == trained
    assert {group.lr for group in groups.values()} == {1e-5, 2e-5}
    assert all(group.lr == 1e-5 for pattern, group in groups.items() if "language" in pattern)
    with pytest.raises(ParamError, match=r"train.lr_for: 'langage' is no pattern of names, and not one of vision"):
        preview(params.change(**{"train.lr_for": {"langage": 1e-5}}))


def test_a_resume_tells_the_rates_that_are_not_the_checkpoints():
    before, now = changed(**{"perceiver.*": 1e-4}), changed(**{"perceiver.*": 1e-5})
    told = other_rates(before.to_dict()["train"], now.to_dict()["train"])
    assert told == "; train.lr_for is {'perceiver.*': 1e-05} now, and was {'perceiver.*': 0.0001}"
    assert other_rates(now.to_dict()["train"], now.to_dict()["train"]) == ""
