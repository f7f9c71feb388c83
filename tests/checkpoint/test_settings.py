"""The settings of an optimizer's groups and the state of a schedule: a resumed run goes on as the unbroken one."""

import collections
import inspect
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, Rprop, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from mmfsdp import checkpoint
from mmfsdp.checkpoint.plain import from_json, to_json
from mmfsdp.params import ParamError, StateDictType

STEPS = 9
BROKEN_OFF = 3
"""Steps before the checkpoint."""
GROUPS = ("first", "nothing", "second")
"""Groups of the optimizer: a layer each, and one without parameters."""


def shrinking(number: int) -> float:
    return 0.9**number


SCHEDULES = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([ConstantLR(o, 0.3, 3), ExponentialLR(o, 0.8)], o),
    "ConstantLR": lambda o: ConstantLR(o, 0.3, total_iters=5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="exp_range", gamma=0.9),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.7),
    "LambdaLR": lambda o: LambdaLR(o, shrinking),
    "LinearLR": lambda o: LinearLR(o, 0.2, total_iters=6),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 5, 7], gamma=0.3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, shrinking),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.1, 0.2], total_steps=STEPS),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=7, power=2.0),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, cooldown=1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(o, [LinearLR(o, 0.1, 1, 3), CosineAnnealingLR(o, 6)], [3]),
    "StepLR": lambda o: StepLR(o, 2, gamma=0.5),
}
"""A schedule of each class of torch."""
OPTIMIZERS = {
    "AdamW": lambda groups: AdamW(groups, lr=0.1),
    "AdamW, lr as a tensor": lambda groups: AdamW(groups, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
}


def new_run(make_optimizer, make_schedule, order=GROUPS) -> tuple[nn.Module, Optimizer, LRScheduler]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)})
    groups = {name: {"params": list(layer.parameters())} for name, layer in model.items()}
    groups["nothing"] = {"params": []}
    groups["second"]["weight_decay"] = 0.3
    optimizer = make_optimizer([groups[name] for name in order])
    return model, optimizer, make_schedule(optimizer)


def go_on(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, steps: range) -> list:
    """Train; the settings that each step has used, and the weights after it, all exact."""
    seen = []
    for step in steps:
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = model["second"](model["first"](inputs)).square().mean()
        loss.backward()
        for group in optimizer.param_groups:
            settings = sorted((key, value) for key, value in group.items() if key != "params")
            seen.append(to_json(settings))
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()
        seen += [p.detach().numpy().tobytes() for p in model.parameters()]
    return [*seen, to_json(schedule.state_dict())]


def test_a_schedule_of_each_class_of_torch_is_tested():
    classes = set()
    for module in (lr_scheduler, swa_utils):
        for name, each in inspect.getmembers(module, inspect.isclass):
            if issubclass(each, LRScheduler) and not name.startswith("_"):
                classes.add(name)
    assert classes - {"LRScheduler"} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_the_rates_and_weights_of_the_unbroken_one(tmp_path, name):
    for make_optimizer in OPTIMIZERS.values():
        whole = go_on(*new_run(make_optimizer, SCHEDULES[name]), range(STEPS))
        settings = [each for each in whole if isinstance(each, list)]
        assert len(set(map(str, settings))) > len(GROUPS), "the schedule changes them"
        model, optimizer, schedule = new_run(make_optimizer, SCHEDULES[name])
        begin = go_on(model, optimizer, schedule, range(BROKEN_OFF))[:-1]
        folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, step=BROKEN_OFF)
        model, optimizer, schedule = new_run(make_optimizer, SCHEDULES[name])
        checkpoint.resume(model, optimizer, folder, schedule=schedule)
        assert begin + go_on(model, optimizer, schedule, range(BROKEN_OFF, STEPS)) == whole


def settings_of(optimizer: Optimizer, key: str) -> list:
    return [group[key] for group in optimizer.param_groups]


def saved_run(folder, changes: dict) -> tuple:
    """A run of one step whose groups then have other settings, saved. changes: number of a group to settings."""
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    go_on(model, optimizer, schedule, range(1))
    for number, settings in changes.items():
        optimizer.param_groups[number].update(settings)
    return checkpoint.save(folder, model=model, optimizer=optimizer, step=1), model, optimizer


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"])
def test_settings_follow_the_parameters_where_groups_are_in_another_order(tmp_path, kind, capsys):
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    go_on(model, optimizer, schedule, range(1))
    first, nothing, second = optimizer.param_groups
    first.update(lr=torch.tensor(0.025, dtype=torch.float64), betas=(0.5, 0.75), own=["a", {1: None}])
    nothing["lr"] = float("inf")
    second["lr"] = 0.5
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1, kind=StateDictType(kind))
    model, optimizer, _ = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"], order=("second", "first", "nothing"))
    held = optimizer.param_groups[1]
    lines = checkpoint.resume(model, optimizer, folder).settings
    assert optimizer.param_groups[1] is held, "a person may hold a group"
    assert settings_of(optimizer, "lr") == [0.5, torch.tensor(0.025, dtype=torch.float64), float("inf")]
    assert held["lr"].dtype is torch.float64
    assert settings_of(optimizer, "betas") == [(0.9, 0.999), (0.5, 0.75), (0.9, 0.999)]
    assert settings_of(optimizer, "weight_decay") == [0.3, 0.01, 0.01]
    assert held["own"] == ["a", {1: None}]
    assert "lr of group 0 (2 parameters, such as second.weight) is 0.5, as saved; before the resume it was 0.1" in lines
    assert "own of group 1 (2 parameters, such as first.weight) is ['a', {1: None}], as saved; before " in str(lines)
    printed = capsys.readouterr().out
    assert all(f"step_00000001: {line}\n" in printed for line in lines)
    assert not [file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".json", ".safetensors")]


def test_groups_that_share_a_tensor_in_the_script_get_their_own_values(tmp_path):
    folder, *_ = saved_run(tmp_path, {0: {"lr": torch.tensor(0.5)}, 2: {"lr": torch.tensor(0.25)}})
    model, optimizer, _ = new_run(OPTIMIZERS["AdamW, lr as a tensor"], SCHEDULES["MultiStepLR"])
    checkpoint.resume(model, optimizer, folder)
    first, _, second = settings_of(optimizer, "lr")
    assert (first.item(), second.item()) == (0.5, 0.25)


def test_a_script_may_keep_its_own_settings(tmp_path):
    folder, *_ = saved_run(tmp_path, {0: {"lr": 7.0}})
    model, optimizer, _ = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    assert checkpoint.resume(model, optimizer, folder, settings=False).settings == ()
    assert settings_of(optimizer, "lr") == [0.1, 0.1, 0.1]
    assert optimizer.state[model["first"].weight]["step"] == 1


def test_groups_that_were_joined_are_refused_only_if_their_settings_differed(tmp_path):
    def joined() -> tuple[nn.Module, Optimizer]:
        model, *_ = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
        return model, AdamW(model.parameters(), lr=1.0)

    folder, *_ = saved_run(tmp_path, {0: {"lr": 0.05, "weight_decay": 0.3}, 2: {"lr": 0.05}})
    model, optimizer = joined()
    checkpoint.resume(model, optimizer, folder)
    assert settings_of(optimizer, "lr") == [0.05]
    folder, *_ = saved_run(tmp_path, {0: {"lr": 0.05}, 2: {"lr": 0.25, "weight_decay": 0.01}})
    model, optimizer = joined()
    before = model["first"].weight.clone()
    words = "optimizer: group 0 .* has first.weight and second.weight, .* with lr 0.05 and 0.25; .*settings=False"
    with pytest.raises(ParamError, match=words):
        checkpoint.resume(model, optimizer, folder)
    assert torch.equal(model["first"].weight, before) and settings_of(optimizer, "lr") == [1.0]


def test_parameters_that_are_new_keep_the_settings_of_the_script_and_are_named(tmp_path):
    folder, *_ = saved_run(tmp_path, {0: {"lr": 0.05}})
    model, optimizer, _ = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    model["third"] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model["third"].parameters(), "lr": 0.7})
    lines = checkpoint.resume(model, optimizer, folder).settings
    assert settings_of(optimizer, "lr") == [0.05, 0.1, 0.1, 0.7]
    assert (
        "group 3 (2 parameters, such as third.weight) is not in the checkpoint: its settings stay as they are" in lines
    )


def test_what_a_resume_does_not_restore_is_told(tmp_path):
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    folder = checkpoint.save(tmp_path, model=model, step=1)
    assert "saved without an optimizer" in checkpoint.resume(model, optimizer, folder).settings[0]
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, step=2)
    assert "the state of a StepLR, which is not restored" in checkpoint.resume(model, optimizer, folder).settings[0]
    _, _, cosine = new_run(OPTIMIZERS["AdamW"], SCHEDULES["CosineAnnealingLR"])
    with pytest.raises(ParamError, match="schedule: is a CosineAnnealingLR, .* the state of a StepLR"):
        checkpoint.resume(model, optimizer, folder, schedule=cosine)


def test_a_schedule_of_groups_in_another_order_is_refused(tmp_path):
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, step=1)
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"], order=("second", "nothing", "first"))
    words = r"schedule: group 0 \(2 parameters, such as second.weight\) of the optimizer was group 2; make the groups"
    with pytest.raises(ParamError, match=words):
        checkpoint.resume(model, optimizer, folder, schedule=schedule)


def test_what_json_cannot_hold_is_named_before_anything_is_written(tmp_path, capsys):
    model, optimizer, schedule = new_run(OPTIMIZERS["AdamW"], SCHEDULES["StepLR"])
    schedule.own = model
    with pytest.raises(ParamError, match="schedule: the state of StepLR has 'own', a ModuleDict, and nothing is pick"):
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, step=1)
    for record, words in {
        '"schedule" has keys': {"schedule": MultiStepLR(optimizer, [3]).state_dict()},
        "'rates' cannot be written as JSON": {"rates": torch.ones(1)},
        "has 'step', which a checkpoint writes itself": {"step": 3},
    }.items():
        with pytest.raises(ParamError, match=f"record: .*{record.strip(chr(34)).replace(chr(34), chr(39))}"):
            checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1, record=words)
    assert not list(tmp_path.iterdir())
    optimizer.param_groups[0]["own"] = len
    checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1)
    assert (
        "step_00000001: 'own' of group 0 (2 parameters, such as first.weight) is a builtin_fun"
        in capsys.readouterr().out
    )


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path):
    for make in (OPTIMIZERS["AdamW"], OPTIMIZERS["SGD"]):
        whole = go_on(*new_run(make, SCHEDULES["StepLR"]), range(3))
        model, optimizer, schedule = new_run(make, SCHEDULES["StepLR"])
        checkpoint.save(tmp_path, model=model, optimizer=optimizer, schedule=schedule, step=0)
        assert go_on(model, optimizer, schedule, range(3)) == whole


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, lr=0.1, amsgrad=True),
        lambda params: NAdam(params, lr=0.1),
        lambda params: Rprop(params, lr=0.1),
        lambda params: Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
        lambda params: torch.optim.ASGD(params, lr=0.1, t0=1),
        lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    ],
)
def test_a_parameter_without_a_gradient_so_far_begins_as_in_a_new_optimizer(tmp_path, make):
    def new() -> tuple[nn.ModuleDict, Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        return model, make(model.parameters())

    def step(model: nn.ModuleDict, optimizer: Optimizer, *parts: str) -> None:
        sum(model[part](torch.ones(1, 4)).square().sum() for part in parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = new()
    step(model, optimizer, "used")
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1)
    resumed, resumed_optimizer = new()
    checkpoint.resume(resumed, resumed_optimizer, folder)
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        step(*each, "used")
        step(*each, "used", "unused")
        step(*each, "used", "unused")
    for (name, p), q in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def test_values_come_back_from_json_as_they_were():
    values = [
        None,
        True,
        0.1 + 0.2,
        float("-inf"),
        (1, (2.0, "a")),
        {3: "three", (1, 2): [4]},
        collections.Counter({5: 2}),
        np.float32(0.1),
        np.int64(3),
        torch.tensor([[0.1, 2.0]], dtype=torch.bfloat16),
        torch.zeros(2, 0),
    ]
    for value in values:
        back = from_json(json.loads(json.dumps(to_json(value))))
        assert type(back) is type(value)
        if isinstance(value, torch.Tensor):
            assert back.dtype is value.dtype and torch.equal(back, value) and back.shape == value.shape
        else:
            assert back == value
