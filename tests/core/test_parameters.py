"""Hooks and attributes of parameters: kept by wrapping where that is right, else hooks are refused."""

import warnings

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from mmfsdp.core.parameters import new_parameter
from mmfsdp.core.step import train_step
from mmfsdp.params import FSDPParams
from mmfsdp.planning import make_plan, wrap_fsdp

RANKS = 2
WAYS = {
    "FSDP2": {},
    "FSDP2 keep": {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"},
    "FSDP2 replicate": {"frozen_policy": "REPLICATE"},
    "FSDP2 bf16": {"mixed_precision": "bf16"},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 flat": {"backend": "FSDP1", "use_orig_params": False},
    "DDP": {"backend": "DDP"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
}
WHOLE = ("DDP", "no shard")
OLD_ROWS = 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x).relu()


class Words(nn.Module):
    """A table, two layers and a head; a weight knows its own scale."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 9)
        self.scales: list[float] = []

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            self.scales.append(getattr(layer.up.weight, "scale", 0.0))
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Halved(nn.Module):
    """A parametrization of a weight."""

    def forward(self, weight):
        return 0.5 * weight + 0.1


class Parametrized(nn.Module):
    """A frozen layer and two that train; the weights of all are computed from other parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 9)
        parametrizations.weight_norm(self.layers[1].up)
        for layer in (self.layers[0], self.layers[2]):
            parametrize.register_parametrization(layer.up, "weight", Halved())
        self.layers[0].requires_grad_(False)

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words(change=None) -> nn.Module:
    torch.manual_seed(0)
    model = Words()
    if change is not None:
        change(model)
    return model


def inputs_of(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(1, 0)}


def mask_old_rows(gradient: torch.Tensor) -> torch.Tensor:
    keeps = torch.arange(9, device=gradient.device) >= OLD_ROWS
    return gradient * keeps[:, None]


def mask_in_place(p: nn.Parameter) -> None:
    p.grad[:OLD_ROWS] = 0


def with_hook(model: nn.Module) -> None:
    model.table.weight.register_hook(mask_old_rows)


def with_hook_after_accumulation(model: nn.Module) -> None:
    model.table.weight.register_post_accumulate_grad_hook(mask_in_place)


def with_scales(model: nn.Module) -> None:
    for number, layer in enumerate(model.layers):
        layer.up.weight.scale = number + 1.0


HOOKS = {"register_hook": with_hook, "register_post_accumulate_grad_hook": with_hook_after_accumulation}


def steps(model: nn.Module, ranks: list[int]) -> list[float]:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return [train_step(model, [inputs_of(10 * i + rank) for rank in ranks], optimizer).loss for i in range(3)]


def wrapped_words(way: str, change, *, on_meta: bool = False) -> nn.Module:
    model = words(change)
    rank = torch.distributed.get_rank()
    if on_meta and rank:
        for name, p in list(model.named_parameters()):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, new_parameter(p.detach().to("meta"), like=p))
    return wrap_fsdp(model, FSDPParams(**WAYS[way]), example=inputs_of(0))


def parameter_objects() -> dict:
    ranks = [torch.distributed.get_rank()]
    found: dict = {}
    for hook in HOOKS:
        for way in WHOLE:
            for on_meta in (False, True):
                model = wrapped_words(way, HOOKS[hook], on_meta=on_meta)
                losses = steps(model, ranks)
                table = model.module.table.weight
                found[f"{hook}, {way}, {on_meta}"] = losses, table.tolist()
    for way in WAYS:
        for on_meta in (False, True):
            model = wrapped_words(way, with_scales, on_meta=on_meta)
            steps(model, ranks)
            inner = getattr(model, "module", model)
            attributes = [getattr(p, "scale", 0.0) for name, p in model.named_parameters() if "up.weight" in name]
            found[f"attributes, {way}, {on_meta}"] = attributes, inner.scales[-2:]
    for way in WAYS:
        model = wrap_fsdp(Parametrized(), FSDPParams(**WAYS[way]), example=inputs_of(0))
        found[f"parametrized, {way}"] = steps(model, ranks)
    found["later"] = warnings_of_later_hooks()
    return found


def warnings_of_later_hooks() -> list[str]:
    """What the first step says of hooks that were put on after wrapping."""
    model = wrapped_words("FSDP2", None)
    with_hook(model)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, [torch.distributed.get_rank()])
    return [str(warning.message) for warning in caught if "put on after wrapping" in str(warning.message)]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return on_ranks(parameter_objects, RANKS)


@pytest.mark.real
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_protects_rows_does_so_where_each_rank_has_the_whole_table(two_ranks, hook, way, on_meta):
    model = words(HOOKS[hook])
    before = model.table.weight.detach().clone()
    losses = steps(model, list(range(RANKS)))
    assert losses != pytest.approx(steps(words(), list(range(RANKS))))
    for rank in two_ranks:
        losses_of_rank, table = rank[f"{hook}, {way}, {on_meta}"]
        assert losses_of_rank == pytest.approx(losses, rel=1e-5)
        assert table[:OLD_ROWS] == before[:OLD_ROWS].tolist()
        assert table[OLD_ROWS:] != before[OLD_ROWS:].tolist()


@pytest.mark.real
@pytest.mark.parametrize("way", WAYS)
def test_parametrized_weights_train_as_in_one_process(two_ranks, way):
    losses = steps(Parametrized(), list(range(RANKS)))
    tolerance = 0.02 if "bf16" in way else 1e-5
    for rank in two_ranks:
        assert rank[f"parametrized, {way}"] == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in WHOLE])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_parameter_that_is_sharded_is_refused_by_name(hook, way):
    model = words(HOOKS[hook])
    plan = make_plan(model, FSDPParams(**WAYS[way]), world_size=2)
    (finding,) = [finding for finding in plan.lint if finding.level == "error"]
    name = {"register_hook": "mask_old_rows", "register_post_accumulate_grad_hook": "mask_in_place"}[hook]
    assert f"table.weight: has a hook, {hook}({name}), " in finding.message
    assert "set backend to DDP" in finding.message


def test_a_hook_of_a_frozen_parameter_is_never_called_and_not_refused():
    model = words(with_hook)
    model.table.requires_grad_(False)
    plan = make_plan(model, FSDPParams(), world_size=2)
    assert not [finding for finding in plan.lint if finding.code == "hook"]


def test_a_handle_removes_the_hook_of_the_parameter_in_the_place_of_another():
    calls: list[str] = []
    old = nn.Parameter(torch.ones(2))
    handles = [
        old.register_hook(lambda gradient: calls.append("gradient")),
        old.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated")),
    ]
    new = new_parameter(torch.zeros(2), like=old)
    new.sum().backward()
    assert calls == ["gradient", "accumulated"]
    for handle in handles:
        handle.remove()
    new.sum().backward()
    assert len(calls) == 2


@pytest.mark.real
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("way", ["DDP", "no shard", "FSDP2", "FSDP2 keep", "FSDP2 replicate", "FSDP2 bf16"])
def test_attributes_of_parameters_are_kept(two_ranks, way, on_meta):
    for rank in two_ranks:
        of_parameters, in_forward = rank[f"attributes, {way}, {on_meta}"]
        assert of_parameters == [1.0, 2.0]
        assert in_forward == [1.0, 2.0]


@pytest.mark.real
def test_a_hook_that_was_put_on_after_wrapping_is_told_in_the_first_step(two_ranks):
    table, head = two_ranks[0]["later"]
    assert (
        "table.weight: has a hook, register_hook(mask_old_rows), put on after wrapping; FSDP2 never calls it" in table
    )
    assert "head.weight: has a hook, register_post_accumulate_grad_hook(" in head
    assert "with this rank's shard of the reduced gradient" in head
    assert two_ranks[1]["later"] == []
