"""What the package remembers of a model, the names of parameters inside wrappers, and gradients of before a step."""

import gc

import pytest
import torch
import torch.distributed as dist
from ranks import fake_group
from tiny import tiny_flamingo
from torch import nn
from torch.optim import SGD

from mmfsdp.core import model_record
from mmfsdp.core.inference import keep_gathered
from mmfsdp.core.model_record import plan_of, record_of
from mmfsdp.core.names import modules_of, parameters_of, plain_name, unwrapped
from mmfsdp.core.step import train_step
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, ParamError, TrainParams
from mmfsdp.planning import make_plan, wrap_fsdp

BACKENDS = ("DDP", "FSDP1", "FSDP2")


@pytest.fixture(autouse=True)
def group(request):
    """Two fake ranks; for DDP, whose backward needs the reply of a collective, one real rank in this process."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend") == "DDP":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
        return
    with fake_group(2):
        yield


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.first(x).relu()).mean()

    def count_label_tokens(self, batch):
        return len(batch["x"])


class Around(nn.Module):
    """A model with a part called `module`, as people's own wrappers have."""

    def __init__(self):
        super().__init__()
        self.module = Inner()
        self.before = nn.Linear(4, 4)

    def forward(self, x):
        return self.module(self.before(x))

    def count_label_tokens(self, batch):
        return self.module.count_label_tokens(batch)


def wrapped(backend: str) -> nn.Module:
    return wrap_fsdp(Around(), FSDPParams(backend=backend), example={"x": torch.zeros(2, 4)})


def trainable_of(model: nn.Module, *, but: str = "no name") -> SGD:
    return SGD([p for name, p in model.named_parameters() if p.requires_grad and but not in name], lr=0.1)


BATCHES = [{"x": torch.ones(2, 4)}]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_of_a_model_may_be_called_module(backend):
    model = wrapped(backend)
    inner = unwrapped(model)
    assert isinstance(inner, Around)
    names = [plain_name(name, model) for name, _ in model.named_parameters()]
    assert names == [name for name, _ in Around().named_parameters()]
    optimizer, _ = build_optimizer(model, TrainParams())
    train_step(model, BATCHES, optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_the_optimizer_lacks_has_its_name_of_before_wrapping(backend):
    model = wrapped(backend)
    with pytest.raises(ParamError, match="^optimizer: before.weight: trainable, but not given to the optimizer"):
        train_step(model, BATCHES, trainable_of(model, but="before.weight"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_before_the_step_is_told(backend):
    model = wrapped(backend)
    optimizer = trainable_of(model)
    model(**BATCHES[0]).backward()
    with pytest.raises(ParamError, match=r"^model: module.first.weight, .*: has a gradient of a backward before"):
        train_step(model, BATCHES, optimizer)
    optimizer.zero_grad()
    train_step(model, BATCHES, optimizer)


def leave_out(model, optimizer):
    optimizer.param_groups[0]["params"].pop()


def freeze_first(model, optimizer):
    unwrapped(model).module.first.weight.requires_grad_(False)


def unfreeze(model, optimizer):
    unwrapped(model).before.weight.requires_grad_(True)


def add_part(model, optimizer):
    unwrapped(model).more = nn.Linear(2, 2)


def replace_part(model, optimizer):
    unwrapped(model).module.second.bias = nn.Parameter(torch.zeros(1))


CHANGES = {
    leave_out: "before.bias: trainable, but not given to the optimizer",
    freeze_first: "module.first.weight: frozen, yet given to the optimizer",
    unfreeze: "before.weight: frozen when the plan was made, trainable now",
    add_part: "more.weight, more.bias: not in the plan",
    replace_part: "module.second.bias: trainable, but not given to the optimizer",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_a_step_is_told_before_the_next_one(change):
    """Parameters and optimizer are compared again if, and only if, one of them has changed."""
    model = Around()
    model.before.weight.requires_grad_(False)
    model = wrap_fsdp(model, FSDPParams(), example={"x": torch.zeros(2, 4)})
    optimizer = trainable_of(model)
    train_step(model, BATCHES, optimizer)
    checked = record_of(model).checked
    train_step(model, BATCHES, optimizer)
    assert record_of(model).checked is checked
    change(model, optimizer)
    for _ in range(2):  # not only once
        with pytest.raises(ParamError, match=CHANGES[change]):
            train_step(model, BATCHES, optimizer)


def test_another_optimizer_is_compared_with_the_model():
    model = wrapped("FSDP2")
    train_step(model, BATCHES, trainable_of(model))
    with pytest.raises(ParamError, match="before.weight: trainable, but not given to the optimizer"):
        train_step(model, BATCHES, trainable_of(model, but="before.weight"))


def test_modules_and_parameters_are_those_of_torch_in_its_order():
    model = tiny_flamingo(tied=True)
    model.again = model.language_model  # found twice
    assert list(modules_of(model)) == list(model.modules())
    assert all(p is q for p, q in zip(parameters_of(model), model.parameters(), strict=True))


def test_a_model_does_not_answer_for_a_wrapped_model_inside_it():
    flamingo = tiny_flamingo()
    inner = wrap_fsdp(flamingo.language_model, FSDPParams())
    assert flamingo.generation_config is inner.generation_config, "it hands attributes of the inner model through"
    assert plan_of(inner) is not None
    assert plan_of(flamingo) is None
    with keep_gathered(inner):
        assert record_of(inner).keeps_gathered
        assert not record_of(flamingo).keeps_gathered
    record_of(inner).first_step_checked = True
    assert not record_of(flamingo).first_step_checked


def test_a_compiled_model_has_the_record_of_the_model():
    model = wrapped("FSDP2")
    compiled = torch.compile(model)
    assert plan_of(compiled) is plan_of(model)
    assert record_of(compiled) is record_of(model)
    assert unwrapped(torch.compile(wrapped("DDP"))).__class__ is Around
    names = [plain_name(name, compiled) for name, _ in compiled.named_parameters()]
    assert names == [name for name, _ in Around().named_parameters()]


def test_wrapping_begins_a_record_and_nothing_stays_of_a_model_that_is_gone():
    gc.collect()
    before = len(model_record._records)
    model = Around()
    record_of(model).first_step_checked = True
    model = wrap_fsdp(model, FSDPParams(), example={"x": torch.zeros(2, 4)})
    assert not record_of(model).first_step_checked
    assert not any("mmfsdp" in name for name in vars(model))
    del model
    gc.collect()
    assert len(model_record._records) == before


def test_a_plan_that_runs_as_ddp_names_no_way_to_shard():
    plan = make_plan(tiny_flamingo(), FSDPParams(enable_fsdp=False), world_size=2)
    assert str(plan).startswith("DDP on 2 ranks (2 x 1), FROZEN_AWARE: ")
