"""The same bytes at 8, 64 and 1,024 ranks: one process under torch's fake process group sends what was predicted.

DDP is missing: its reducer takes no reply from a fake group.
"""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import last_layer_trains, tiny_batch, tiny_flamingo
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mmfsdp.core.before_step import check_step
from mmfsdp.core.inference import keep_gathered
from mmfsdp.core.names import plain_name
from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.step import train_step
from mmfsdp.core.weights import take_weights
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.meters import Collectives, register_counting_kernels
from mmfsdp.kit.train.optimizer import build_optimizer, build_scaler
from mmfsdp.params import FSDPParams, ParamError, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate
from tests.parity import local, wire
from tests.ranks import fake_group

KEPT = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
CASES = {
    "SHARD": {},
    "KEEP bf16": {**KEPT, "mixed_precision": "bf16"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 4},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 KEEP": {"backend": "FSDP1", **KEPT},
}


@pytest.fixture(params=[8, 1024])
def ranks(request):
    with fake_group(request.param):
        yield request.param


@dataclass
class Output:
    """FSDP1 finds tensors in dataclasses, and not in a SimpleNamespace."""

    loss: torch.Tensor


class Often(nn.Module):
    """A layer that runs three times, one that never does, one that keeps a parameter it never uses and runs once more
    on an input that needs no gradient, and a table of ids, which need none."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4))
        self.layers[2].extra = nn.Parameter(torch.ones(40, 32))
        self.layers[3].requires_grad_(False)
        self.table = nn.Embedding(64, 32)

    def forward(self, x):
        ids = torch.zeros(2, dtype=torch.int64)
        words = self.table(ids) + self.table(ids + 1)
        for i in (3, 0, 0, 0, 2):
            x = x + self.layers[i](x)
        return Output(loss=(x + words + self.layers[2](torch.ones(2, 32))).square().mean())


class UnderTwoNames(nn.Module):
    """An embedding and a frozen block that the model knows under two names each, as T5 does; the block runs twice."""

    def __init__(self):
        super().__init__()
        self.embedding = self.also = nn.Embedding(16, 32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).requires_grad_(False)
        self.blocks = nn.ModuleList([self.block, nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))])

    def forward(self, x):
        x = self.block(self.also(x.flatten().long()))
        for block in self.blocks:
            x = x + block(x)
        return Output(loss=x.square().mean())


class Rows(SimpleNamespace):
    """As many numbers as a batch has to have."""

    label_tokens, size, source, weight = 8, 2, "data", 1.0

    def to(self, device):
        return self

    def inputs(self):
        return {"x": torch.ones(2, 32)}


class Words(Rows):
    """Two texts of eight tokens, of which seven are labels."""

    label_tokens = 14

    def inputs(self):
        ids = torch.ones(2, 8, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}


def decoder_whose_inputs_require_grad():
    """Return a decoder of which only the last layer trains, after `enable_input_require_grads()`."""
    model = last_layer_trains()
    model.enable_input_require_grads()
    return model


MODELS = {
    "often": (Often, Rows),
    "under two names": (UnderTwoNames, Rows),
    "flamingo": (tiny_flamingo, tiny_batch),
    "inputs require grad": (decoder_whose_inputs_require_grad, Words),
}


@pytest.mark.filterwarnings("error:The .grad attribute")
@pytest.mark.parametrize("name", MODELS)
def test_bytes_at_any_number_of_ranks_however_often_a_module_runs(ranks, name):
    make, batch = MODELS[name]
    plans = {}
    for case, fields in CASES.items():
        plans[case] = make_plan(make(), FSDPParams(**fields), world_size=ranks, example=batch().inputs())
    for micro_steps, (case, plan) in itertools.product((1, 3), plans.items()):
        train = TrainParams(accumulation=micro_steps)
        model = apply_plan(make(), plan)
        optimizer, _ = build_optimizer(model, train)
        with Collectives() as counted:
            train_step(model, [batch()] * micro_steps, optimizer, max_grad_norm=1.0)
            sent = wire(counted.rows())
        assert sent == wire(estimate(plan, train).wire), (case, micro_steps)
        states = [t for of in optimizer.state.values() for t in of.values() if t.ndim]
        if name == "often":
            assert sum(local(t).nbytes for t in states) == estimate(plan).memory.optimizer, case


@pytest.mark.filterwarnings("error::FutureWarning")
def test_ddp_is_wrapped_without_a_deprecation_and_leaves_buffers_to_each_rank():
    with fake_group(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        plan = make_plan(model, FSDPParams(backend="DDP"), world_size=2)
        wrapped = apply_plan(model, plan)
        assert not wrapped.broadcast_buffers


class Chain(nn.Module):
    """Layers of which no two are of one size; the first and the third are frozen, so backward passes through one."""

    WIDTHS = (16, 24, 40, 64, 96)

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(self.WIDTHS)]
        self.layers = nn.ModuleList(layers)
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return Output(loss=x.square().mean())


LAYERS = [f"layers.{i}" for i in range(4)]
EXAMPLE = {"x": torch.ones(2, Chain.WIDTHS[0])}


def plan_of_chain(model: Chain, fields: dict) -> WrapPlan:
    """Each layer is a unit."""
    plan = make_plan(model, FSDPParams(**fields), world_size=4, example=EXAMPLE)
    assert [unit.modules for unit in plan.gathered_units] == [(name,) for name in LAYERS]
    return plan


@contextmanager
def gathers_of(plan: WrapPlan):
    """The list of the layers that are gathered inside, which are told apart by their size."""
    layer_of = {unit.unsharded_bytes: unit.modules[0] for unit in plan.gathered_units}
    gathered: list[str] = []

    def note_collective(kind: str, tensors: list[torch.Tensor], ranks: int) -> None:
        if kind == "all-gather":
            gathered.append(layer_of[sum(tensor.nbytes for tensor in tensors)])

    kernels = register_counting_kernels(note_collective)
    try:
        yield gathered
    finally:
        kernels._destroy()


def gathers_ahead(fields: dict) -> tuple[dict, dict, WrapPlan]:
    """By layer: the layers that are gathered ahead of need when it begins forward, and backward; and the plan."""
    model = Chain()
    plan = plan_of_chain(model, fields)
    forward: dict[str, list[str]] = {}
    backward: dict[str, list[str]] = {}
    gathered: list[str]  # since a layer began

    def begins(layer: str, phase: dict[str, list[str]]) -> None:
        phase[layer] = [other for other in gathered if other != layer]
        gathered.clear()

    def begins_forward(layer: str, *_: Any) -> None:
        begins(layer, forward)

    def follow_gradient(layer: str, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: begins(layer, backward))

    for name in LAYERS:
        # Of the layer's first module, inside the unit: FSDP has done what it does when a unit begins.
        inner = model.get_submodule(f"{name}.0")
        inner.register_forward_pre_hook(partial(begins_forward, name))
        inner.register_forward_hook(partial(follow_gradient, name))
    model = apply_plan(model, plan)
    with gathers_of(plan) as gathered:
        for _ in range(2):  # FSDP1 learns the order of its units in the first step
            gathered.clear()
            model(**EXAMPLE).loss.backward()
    return forward, backward, plan


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize("fields", [{"forward_prefetch": True}, {"backward_prefetch": "NO_PREFETCH"}])
def test_units_are_gathered_ahead_of_need_as_the_plan_says(backend, fields):
    with fake_group(4):
        forward, backward, plan = gathers_ahead({"backend": backend, **fields})
    units = {unit.modules[0]: unit for unit in plan.gathered_units}
    assert set(forward) == set(LAYERS)
    assert set(backward) == set(LAYERS[1:]), "backward does not pass through the first"
    for phase, ahead in ((forward, plan.prefetched_in_forward), (backward, plan.prefetched_in_backward)):
        for name, others in phase.items():
            following = ahead.get(units[name].order)
            assert others == ([] if following is None else [following.modules[0]]), name
    assert any(forward.values()) == any(backward.values()) == ("forward_prefetch" in fields)


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize("fields", [{}, KEPT, {"forward_prefetch": True}])
def test_a_forward_without_gradients_frees_what_it_gathers_unless_others_share_it(backend, fields):
    def evaluate() -> list[str]:
        gathered.clear()
        with torch.no_grad():
            model(**EXAMPLE)
        return sorted(gathered)

    with fake_group(4):
        model = Chain()
        plan = plan_of_chain(model, {"backend": backend, **fields})
        freed = [unit.modules[0] for unit in plan.gathered_units if unit.reshard_after_forward]
        model = apply_plan(model, plan)
        with gathers_of(plan) as gathered:
            assert evaluate() == evaluate() == LAYERS
            for _ in range(2):
                with keep_gathered(model):
                    assert evaluate() == LAYERS
                    with keep_gathered(model):
                        assert evaluate() == freed
                    assert evaluate() == freed
            assert evaluate() == LAYERS
            gathered.clear()
            model(**EXAMPLE).loss.backward()
            again = [unit.modules[0] for unit in plan.gathered_units if unit.gathers_backward]
            assert sorted(gathered) == sorted(LAYERS + again)


def test_fp16_without_a_scaler_is_refused_before_a_step():
    with fake_group(4):
        model = Chain()
        model = apply_plan(model, plan_of_chain(model, {"mixed_precision": "fp16"}))
        optimizer, _ = build_optimizer(model, TrainParams())
        with pytest.raises(ValueError, match="scaler: None.*build_scaler"):
            check_step(model, optimizer, None)
        check_step(model, optimizer, build_scaler(model))


def test_what_was_frozen_or_made_trainable_after_ddp_is_told():
    def ddp(**options: bool) -> tuple[DistributedDataParallel, SGD]:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        layers[0].requires_grad_(False)
        return DistributedDataParallel(layers, **options), SGD(layers.parameters(), lr=1)

    with fake_group(2):
        for allows_fewer in (False, True):
            model, optimizer = ddp(find_unused_parameters=allows_fewer)
            check_step(model, optimizer, None)
            model.module[1].requires_grad_(False)
            if allows_fewer:  # DDP looks for what has no gradient in each step
                check_step(model, optimizer, None)
            else:
                with pytest.raises(ParamError, match="2 parameters train, and when DDP wrapped the model 4 did"):
                    check_step(model, optimizer, None)
            model.module.requires_grad_(True)
            with pytest.raises(ParamError, match="6 parameters train, and when DDP wrapped the model 4 did"):
                check_step(model, optimizer, None)


@pytest.mark.parametrize("backend", ["DDP", "FSDP1", "FSDP2"])
def test_weights_are_sent_once_and_only_with_sync_module_states(backend):
    with fake_group(4), Collectives() as counted:
        for synced in (True, False):
            counted.reset()
            model = Chain()
            nbytes = sum(p.nbytes for p in model.parameters())
            fields = {"backend": backend, "sync_module_states": synced}
            apply_plan(model, make_plan(model, FSDPParams(**fields), world_size=4, example=EXAMPLE))
            broadcast = sum(row.bytes for row in counted.rows() if row.kind == "broadcast")
            assert broadcast == (nbytes if synced else 0)


@pytest.mark.parametrize("backend", ["FSDP1", "FSDP2"])
def test_parts_are_refused_before_the_first_forward_and_cost_nothing_after_it(backend):
    with fake_group(4):
        model = Chain()
        linear = model.layers[1][0]
        model = apply_plan(model, plan_of_chain(model, {"backend": backend}))
        with pytest.raises(ParamError, match="layers.1.0 was called before the first forward of the whole model"):
            linear(torch.ones(2, Chain.WIDTHS[1]))
        model(**EXAMPLE)
        assert not linear._forward_pre_hooks


@pytest.mark.parametrize("backend", ["DDP", "FSDP1", "FSDP2"])
def test_a_model_on_the_meta_device_takes_each_weight_once(backend):
    with fake_group(4):
        model = Chain()
        weights = take_weights(model)
        wanted = dict(weights)
        plan = make_plan(model, FSDPParams(backend=backend), world_size=4, example=EXAMPLE)
        model = apply_plan(model, plan, weights=weights)
        assert not weights
        held = {plain_name(name, model): local(p) for name, p in model.named_parameters()}
    assert held.keys() == wanted.keys()
    for name, weight in wanted.items():
        if backend != "FSDP1":  # of one flat parameter rank 0 may have all of a weight, a part, or nothing
            weight = weight.chunk(4)[0] if backend == "FSDP2" else weight
            assert torch.equal(held[name], weight), name
        assert held[name].device.type == "cpu"
