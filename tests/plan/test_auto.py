"""AUTO sends least within its budget, says what it chose, and by how much a budget falls short."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from mmfsdp.estimate import estimate
from mmfsdp.freeze import freeze
from mmfsdp.params import AutoWrapPolicy, FrozenPolicy, FSDPParams, ParamError
from mmfsdp.plan import make_plan
from mmfsdp.plan.auto import memory_of, peak_by
from mmfsdp.plan.table import sent

GIB = 2**30
POLICIES = (FrozenPolicy.SHARD, FrozenPolicy.KEEP, FrozenPolicy.REPLICATE)


class Chain(nn.Module):
    """Linear layers of these widths, some trainable."""

    def __init__(self, widths: list[int], trained: tuple[int, ...]):
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.Linear(w, 8)) for w in widths)
        freeze(self, ["*", *(f"!layers.{i}.*" for i in trained)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def planned(model: nn.Module, budget: int | None, policy=FrozenPolicy.AUTO, ranks: int = 8):
    fsdp = FSDPParams(frozen_policy=policy, memory_budget_gib=budget / GIB if budget else None)
    return make_plan(model, fsdp, world_size=ranks)


def chain(count: int, seed: int) -> Chain:
    rng = random.Random(seed)
    return Chain([8 * rng.randrange(10**4, 10**5) for _ in range(count)], tuple(rng.sample(range(count), 2)))


def traffic(plan) -> int:
    return sum(sent(plan, u) for u in plan.units)


@pytest.mark.parametrize("units, seed", [(5, 0), (8, 1), (12, 3)])
def test_as_exhaustive_search(units, seed):
    model = chain(units, seed)
    plans = [planned(model, None, p) for p in POLICIES]
    frozen = [i for i, u in enumerate(plans[0].units) if u.kind == "frozen"]
    everything = []
    for picks in itertools.product(range(3), repeat=len(frozen)):
        units = list(plans[0].units)
        for i, pick in zip(frozen, picks, strict=True):
            units[i] = plans[pick].units[i]
        mix = plans[0].__class__(plans[0].fsdp, 8, 1, 8, tuple(units))
        everything.append((memory_of(mix), traffic(mix)))
    low, high = min(everything)[0], max(everything)[0]
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = int(low + share * (high - low)) + 1
        auto = planned(model, budget)
        best = min(wire for memory, wire in everything if memory <= budget)
        assert traffic(auto) == best or auto.backend == "DDP" and traffic(auto) < best
        assert memory_of(auto) == estimate(auto).memory_bytes <= budget
        assert auto.why.startswith("AUTO: ") and auto.why[:40] in str(auto)


@pytest.mark.parametrize("count, rows", [(5, 64), (7, 2000)])
def test_with_an_example_the_peak_is_within_the_budget_and_as_exhaustive_search(count, rows):
    model, example = chain(count, 2), {"x": torch.zeros(rows, 8)}

    def made(**fields):
        return make_plan(model, FSDPParams(**fields), world_size=8, example=example)

    plans = [made(frozen_policy=p) for p in POLICIES]
    mixes = itertools.product(
        *({id(u): u for u in units}.values() for units in zip(*(p.units for p in plans), strict=True))
    )
    everything = []
    for mix in {tuple(u.frozen_policy for u in mix): mix for mix in mixes}.values():
        mixed = replace(plans[0], units=mix)
        everything.append((peak_by(mixed), traffic(mixed)))
    low, high = min(everything)[0], max(everything)[0]
    assert low > memory_of(plans[0]) or rows < 100, "activations count"
    for share in (0.0, 0.4, 0.8):
        budget = int(low + share * (high - low)) + 1
        auto = made(frozen_policy="AUTO", memory_budget_gib=budget / GIB)
        assert traffic(auto) == min(wire for peak, wire in everything if peak <= budget)
        assert estimate(auto).peak_bytes <= budget and " at most " in auto.why
    with pytest.raises(ParamError, match="too little: the least that a rank can hold") as error:
        made(frozen_policy="AUTO", memory_budget_gib=low / 2 / GIB)
    fix = float(str(error.value).split("set it to ")[1].split(",")[0])
    assert estimate(made(frozen_policy="AUTO", memory_budget_gib=fix)).peak_bytes <= fix * GIB


def test_near_the_fractional_bound_when_units_are_many():
    model = chain(60, 0)
    plans = [planned(model, None, p) for p in POLICIES]
    low = memory_of(plans[0])
    for budget in (int(low * 1.5), int(low * 3), int(low * 6)):
        auto = planned(model, budget)
        assert memory_of(auto) <= budget
        assert traffic(auto) <= 1.02 * bound(plans, auto, budget)


def bound(plans, auto, budget: int) -> float:
    """Least traffic if units could be divided, with as much for what is gathered for a while as was chosen."""
    shard, _, whole = plans
    for_a_while = memory_of(auto) - sum(u.held_bytes for u in auto.units)
    memory, wire = for_a_while + sum(u.held_bytes for u in shard.units), float(traffic(shard))
    gains = []
    for a, b in zip(shard.units, whole.units, strict=True):
        if a.kind == "frozen":
            gains.append((sent(shard, a) / (b.held_bytes - a.held_bytes), b.held_bytes - a.held_bytes))
    for rate, cost in sorted(gains, reverse=True):
        taken = min(cost, max(0, budget - memory))
        memory, wire = memory + taken, wire - rate * taken
    return wire


def test_grad_flow_is_replicated_first_and_ddp_is_for_the_tiny():
    model = Chain([10**5] * 9, (4,))
    least = memory_of(planned(model, None, FrozenPolicy.SHARD))
    some = planned(model, least + 2 * 7 * 10**6)
    chosen = [u for u in some.units if u.frozen_policy is FrozenPolicy.REPLICATE]
    assert chosen and all(u.grad_flow for u in chosen)
    tiny = Chain([10**5] * 5 + [8], (5,))
    assert planned(tiny, GIB).backend == "DDP" and "DDP" in planned(tiny, GIB).why
    large = Chain([10**5] * 5 + [10**6], (5,))
    fsdp = FSDPParams(
        frozen_policy="AUTO", memory_budget_gib=1, sharding_strategy="SHARD_GRAD_OP", mixed_precision="bf16"
    )
    auto = make_plan(large, fsdp, world_size=8)  # 6 bytes for each trainable one, DDP 8
    assert auto.backend == "FSDP2" and {u.frozen_policy for u in auto.units if u.kind == "frozen"} == {"REPLICATE"}


def test_a_budget_that_is_too_small_says_by_how_much():
    model = chain(6, 0)
    with pytest.raises(ParamError, match=r"memory_budget_gib: .* MiB too little.*(SHARD|REPLICATE) \d") as error:
        planned(model, 2**20)
    fix = float(str(error.value).split("set it to ")[1].split(",")[0])
    assert memory_of(planned(model, int(fix * GIB))) <= fix * GIB
    with pytest.raises(ParamError):
        planned(model, int((fix - 0.002) * GIB))


def test_policies_of_wrapping_are_the_same_for_auto():
    fsdp = FSDPParams(frozen_policy="AUTO", memory_budget_gib=1, auto_wrap_policy=AutoWrapPolicy.NO_WRAP)
    assert len(make_plan(chain(3, 0), fsdp, world_size=2).units) == 1
