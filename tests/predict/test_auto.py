"""AUTO sends little within its budget, says what it chose, and by how much a budget falls short."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from mmfsdp.core.freeze import freeze
from mmfsdp.params import AutoWrapPolicy, FrozenPolicy, FSDPParams, ParamError, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict.auto import RECOMPUTATIONS, PolicySearch
from mmfsdp.predict.memory import step_walk

GIB = 2**30
BF16 = {"frozen_dtype": "bf16", "mixed_precision": "bf16"}
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


def planned(model: nn.Module, budget: float | None, policy=FrozenPolicy.AUTO, example: dict | None = None):
    fsdp = FSDPParams(frozen_policy=policy, memory_budget_gib=budget / GIB if budget else None)
    return make_plan(model, fsdp, world_size=8, example=example)


def chain(count: int, seed: int) -> Chain:
    rng = random.Random(seed)
    return Chain([8 * rng.randrange(10**4, 10**5) for _ in range(count)], tuple(rng.sample(range(count), 2)))


def memory_of(plan) -> int:
    return step_walk(plan, TrainParams()).peak.bytes


def traffic(plan) -> int:
    return sum(plan.wire_bytes(u) for u in plan.units)


def everything(model: nn.Module, fsdp: FSDPParams, train: TrainParams, example: dict | None):
    """(bytes held, bytes sent) of every mix of policies, by the same memory events."""
    plans = [make_plan(model, fsdp.change(frozen_policy=p), world_size=8, example=example) for p in POLICIES]
    looks = [
        {repr(replace(u, frozen_policy=None)): u for u in units}
        for units in zip(*(p.units for p in plans), strict=True)
    ]
    for mix in itertools.product(*(look.values() for look in looks)):
        plan = replace(plans[0], units=mix)
        yield step_walk(plan, train).peak.bytes, sum(plan.wire_bytes(u, train.accumulation) for u in mix)


@pytest.mark.parametrize(
    "widths, trained, rows, accumulation, fields",
    [
        (7, (3, 5), 16, 1, {}),
        (6, (4,), 64, 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ([8000] * 6, (3,), 20_000, 1, {"forward_prefetch": True}),
        (6, (1,), 2000, 3, BF16),
        (5, (0, 4), 400, 2, {"cpu_offload": True}),
        ([1600, *[16_000] * 5, 1600, 16_000, 16_000], (0, 6), 400, 1, BF16),
    ],
)
def test_within_a_twentieth_of_exhaustive_search(widths, trained, rows, accumulation, fields):
    rng = random.Random(rows)
    model = Chain(
        widths if isinstance(widths, list) else [8 * rng.randrange(100, 10**4) for _ in range(widths)], trained
    )
    example = {"x": torch.zeros(rows, 8, device="meta")}
    fsdp, train = FSDPParams(**fields), TrainParams(accumulation=accumulation, device="cuda")
    found = list(everything(model, fsdp, train, example))
    uniform = [make_plan(model, fsdp.change(frozen_policy=p), world_size=8, example=example) for p in POLICIES]
    low, high = min(step_walk(plan, train).peak.bytes for plan in uniform), max(held for held, _ in found)
    for share in (0.0, 0.1, rng.random(), 0.6, 1.0):
        budget = int(low + share * (high - low)) + 1
        fsdp = fsdp.change(frozen_policy="AUTO", memory_budget_gib=budget / GIB)
        auto = make_plan(model, fsdp, world_size=8, example=example, train=train)
        best = min(wire for held, wire in found if held <= budget)
        sent = sum(auto.wire_bytes(u, accumulation) for u in auto.units)
        assert best <= sent <= 1.05 * best
        assert step_walk(auto, train).peak.bytes <= budget
        assert auto.why.startswith("AUTO: ") and auto.why[:40] in str(auto)
    with pytest.raises(
        ParamError, match=r"memory_budget_gib: .* MiB too little: .* a rank holds at least .*set it to"
    ) as error:
        make_plan(model, fsdp.change(memory_budget_gib=low / 2 / GIB), world_size=8, example=example, train=train)
    fix = float(str(error.value).split("set it to ")[1].split(",")[0])
    assert low <= fix * GIB < low + 2**20


@pytest.mark.parametrize("count, seed, rows", [(60, 0, 16), (20, 1, 500), (18, 2, 40_000)])
def test_near_the_fractional_bound_when_units_are_many(count, seed, rows):
    model = chain(count, seed)
    example = {"x": torch.zeros(rows, 8, device="meta")}
    plans = [planned(model, None, p, example) for p in POLICIES]
    low, high = memory_of(plans[0]), memory_of(plans[2])
    for budget in (low + 0.15 * (high - low), low + 0.6 * (high - low)):
        auto = planned(model, budget, example=example)
        assert memory_of(auto) <= budget
        assert traffic(auto) <= 1.02 * bound(plans, auto, budget)


@pytest.mark.parametrize("fields, device", [({}, "cuda"), (BF16, "cpu"), ({"backend": "FSDP1"}, "cpu")])
def test_what_a_search_keeps_changes_no_answer(fields, device):
    """It counts the bytes of a unit once, and ends a walk that holds too much."""
    rng, model = random.Random(str(fields)), chain(8, 3)
    example, train = {"x": torch.zeros(500, 8, device="meta")}, TrainParams(accumulation=2, device=device)
    plans = {}
    for policy in POLICIES:
        if policy is FrozenPolicy.REPLICATE and fields.get("backend") == "FSDP1":
            continue
        plans[policy] = make_plan(model, FSDPParams(frozen_policy=policy, **fields), world_size=8, example=example)
    search = PolicySearch(plans, 0, train)
    for _ in range(20):
        units = tuple(rng.choice(same) for same in zip(*(plan.units for plan in plans.values()), strict=True))
        plan = replace(search.shard, units=units)
        held = step_walk(plan, train).peak.bytes
        assert search.memory(units) == held
        assert search.traffic(units) == sum(plan.wire_bytes(unit, 2) for unit in units)
        for budget in (0, held // 2, held - 1, held, held + 1):
            search.budget = budget
            assert search.fits(units) == (held <= budget)


def bound(plans, auto, budget: float) -> float:
    """Least traffic if units could be divided, with as much for what is gathered for a while as was chosen."""
    shard, _, whole = plans
    for_a_while = memory_of(auto) - sum(u.bytes_at_rest for u in auto.units)
    memory, wire = for_a_while + sum(u.bytes_at_rest for u in shard.units), float(traffic(shard))
    gains = []
    for a, b in zip(shard.units, whole.units, strict=True):
        if a.kind == "frozen":
            gains.append((shard.wire_bytes(a) / (b.bytes_at_rest - a.bytes_at_rest), b.bytes_at_rest - a.bytes_at_rest))
    for rate, cost in sorted(gains, reverse=True):
        taken = min(cost, max(0, budget - memory))
        memory, wire = memory + taken, wire - rate * taken
    return wire


def test_policies_of_wrapping_are_the_same_for_auto():
    fsdp = FSDPParams(frozen_policy="AUTO", memory_budget_gib=1, auto_wrap_policy=AutoWrapPolicy.NO_WRAP)
    example = {"x": torch.zeros(2, 8, device="meta")}
    assert len(make_plan(chain(3, 0), fsdp, world_size=2, example=example).units) == 1
    with pytest.raises(ParamError, match="frozen_policy: AUTO needs an example"):
        make_plan(chain(3, 0), fsdp, world_size=2)


def test_no_more_is_recomputed_than_the_budget_asks_for():
    """All layers train, so that each keeps its activations unless it is recomputed."""
    model = Chain([8000] * 8, tuple(range(8)))
    example = {"x": torch.zeros(20_000, 8, device="meta")}
    fsdp = FSDPParams(frozen_policy="AUTO", memory_budget_gib=1000)
    train = TrainParams(device="cuda")

    def made(budget: float, choice: str = "auto"):
        params = fsdp.change(memory_budget_gib=budget / GIB, activation_checkpointing=choice)
        return make_plan(model, params, world_size=8, example=example, train=train)

    peaks = {choice: step_walk(made(1000 * GIB, choice), train).peak.bytes for choice in RECOMPUTATIONS}
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True) and len(set(peaks.values())) == len(peaks)
    for choice, peak in peaks.items():
        plan = made(peak + 1)
        assert plan.fsdp.activation_checkpointing == choice and plan == replace(made(peak + 1, choice), why=plan.why)
        assert f"activation_checkpointing {choice} is the least that fits" in str(plan).replace("\n  ", " ")
    with pytest.raises(ParamError, match="memory_budget_gib: .* too little"):
        made(peaks["all"] / 2)
    with pytest.raises(ParamError, match="activation_checkpointing: auto .* is for frozen_policy AUTO"):
        FSDPParams(activation_checkpointing="auto")
    assert fsdp.change(activation_checkpointing="auto").without_auto["activation_checkpointing"] == "none"
