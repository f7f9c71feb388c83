"""The same bytes at 8, 64 and 1,024 ranks: one process under torch's fake process group sends what was predicted.

DDP is missing: its reducer takes no reply from a fake group.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_batch, tiny_flamingo
from torch import nn

from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.estimate import estimate
from mmfsdp.estimate.make_plan import make_plan
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.train.meters import Collectives
from mmfsdp.train.optimizer import build_optimizer
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


MODELS = {"often": (Often, Rows), "under two names": (UnderTwoNames, Rows), "flamingo": (tiny_flamingo, tiny_batch)}


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
