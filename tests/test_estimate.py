"""Predicted traffic is the known floor of each policy."""

import pytest
from torch import nn

from mmfsdp.estimate import CONTROL_BYTES, CONTROL_CALLS, Estimate, estimate
from mmfsdp.freeze import freeze
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.plan import WrapPlan, make_plan

DIM, WORLD = 64, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.inner(x)


class Mostly(nn.Module):
    """4 frozen layers, 1 trainable, 3 frozen ones that backward passes through, and a trainable one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(9))
        freeze(self, ["*", "!layers.4.*", "!layers.8.*"])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


LAYER = DIM * DIM
F_E, F_B, T = 4 * LAYER, 3 * LAYER, 2 * LAYER


def made(world: int = WORLD, accumulation: int = 1, **fields) -> tuple[WrapPlan, Estimate]:
    fields = {"mixed_precision": "bf16", **fields}
    plan = make_plan(Mostly(), FSDPParams(**fields), world_size=world)
    return plan, estimate(plan, TrainParams(accumulation=accumulation))


def without_control(cost: Estimate) -> int:
    return sum(w.wire_bytes for w in cost.wire if w.phase != "control")


def test_the_floor_of_each_policy():
    g = (WORLD - 1) / WORLD
    kept = {"sharding_strategy": "SHARD_GRAD_OP"}
    last = 2 * LAYER  # the last layer of forward, first in backward, need not be gathered twice
    assert without_control(made(frozen_policy="SHARD")[1]) == g * (2 * F_E + 4 * F_B + 8 * T - last)
    assert without_control(made(frozen_policy="KEEP", **kept)[1]) == g * (2 * F_E + 2 * F_B + 6 * T)
    assert without_control(made(frozen_policy="REPLICATE", **kept)[1]) == g * 6 * T
    assert without_control(made(backend="DDP")[1]) == g * 8 * T


def test_accumulation_costs_a_kept_plan_nothing():
    kept = {"sharding_strategy": "SHARD_GRAD_OP", "frozen_policy": "KEEP"}
    assert made(accumulation=4, **kept)[1].wire_bytes == made(**kept)[1].wire_bytes
    assert made(accumulation=4, backend="DDP")[1].wire_bytes == made(backend="DDP")[1].wire_bytes
    once, often = made()[1], made(accumulation=4)[1]
    gathers = sum(w.wire_bytes for w in once.wire if w.kind == "all-gather")
    assert often.wire_bytes == once.wire_bytes + 3 * gathers


def test_control_is_two_small_reductions():
    (row,) = [w for w in made()[1].wire if w.phase == "control"]
    assert (row.count, row.bytes) == (CONTROL_CALLS, CONTROL_CALLS * CONTROL_BYTES)


def test_one_rank_sends_nothing():
    assert made(world=1)[1].wire_bytes == 0


@pytest.mark.parametrize("policy, parts", [("SHARD", 1 / WORLD), ("REPLICATE", 1)])
def test_memory_at_rest(policy, parts):
    plan, cost = made(frozen_policy=policy, frozen_dtype="bf16")
    assert cost.memory.parameters == (F_E + F_B) * 2 * parts + T * 4 / WORLD
    assert cost.memory.gradients == T * 4 / WORLD and cost.memory.optimizer == 2 * T * 4 / WORLD
    assert cost.memory_bytes == sum(vars(cost.memory).values())
    assert max(map(len, str(cost).splitlines())) <= 120


def test_hybrid_shards_inside_and_reduces_across():
    plan, cost = made(sharding_strategy="HYBRID_SHARD", dp_replicate=4, dp_shard=2)
    across = [w for w in cost.wire if w.kind == "all-reduce" and w.phase == "backward"]
    assert [w.wire_bytes for w in across] == [2 * (T * 4 // 2) * 3 // 4]
    assert cost.memory.optimizer == 2 * T * 4 / 2
