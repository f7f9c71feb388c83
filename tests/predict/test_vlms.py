"""transformers' vision-language models as they are, on fake tensors and on two real ranks.

All families are planned with an example. On two ranks they train as one process does, and what each rank sends and
holds is what was planned.
"""

from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from mmfsdp.core.plan import WrapPlan
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate
from tests.bench.peaks import measure_plans
from tests.families import FAMILIES, Inputs, build, thirds
from tests.parity import check_ranks, two_steps
from tests.ranks import on_ranks

REFUSED = {"udop": "its forward selects patches by a mask that it makes of an activation (torch.full_like)"}
"""Families that cannot be planned with an example, and why."""
SIX = ("gemma3", "internvl", "mllama", "qwen2_5_vl", "qwen3_vl", "smolvlm")
OTHERS = ("blip-2", "florence2", "glm4v", "idefics2", "kosmos-2", "llava", "llava_onevision", "mistral3", "paligemma")
OTHERS += ("aya_vision", "git", "idefics", "qwen2_vl")
WAYS: dict[str, dict[str, Any]] = {
    "SHARD": {},
    "KEEP": {"frozen_policy": "KEEP"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "FSDP1": {"backend": "FSDP1"},
    "DDP": {"backend": "DDP"},
}
TRAINED = ("plain", "lora")


@pytest.mark.parametrize("name", thirds(sorted(FAMILIES.keys() - REFUSED.keys()), 2))
def test_a_family_is_planned_with_an_example(name):
    model = build(name, device="meta")
    plan = make_plan(model, FSDPParams(), world_size=8, example=Inputs(name).inputs())
    plan.check()
    trained = {parameter_name for parameter_name, p in model.named_parameters() if p.requires_grad}
    assert plan.flops and plan.memory_events
    assert trained and trained == {p.name for p in plan.params if p.trainable and not p.unused}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_planned_is_refused_with_what_to_do(name):
    model = build(name, device="meta")
    with pytest.raises(ValueError, match="example: the model's forward failed.* leave the example out"):
        make_plan(model, world_size=8, example=Inputs(name).inputs())
    make_plan(model, world_size=8).check()


def make(case: str) -> tuple[nn.Module, list[Inputs]]:
    name, trained, _ = case.split()
    return build(name, lora=trained == "lora"), [Inputs(name, seed=dist.get_rank())]


def measured(plans: dict[str, str]) -> dict[str, Any]:
    """What this rank's first two steps come to, and what it sends and holds, by case."""
    return measure_plans(make, plans)


Case = tuple[str, str, str]
"""A family, what of it is trained, and a way to wrap it."""
SOME = []
"""Each pair of family and what is trained, and of what is trained and way occurs; three ways of each family."""
for i, name in enumerate(SIX):
    for k, way in enumerate(WAYS):
        if (i + k) % len(WAYS) < 3:
            SOME.append((name, TRAINED[(i + k) % len(TRAINED)], way))
ALL = list(product(SIX + OTHERS, TRAINED, WAYS))


def results_of(cases: list[Case]) -> dict[str, tuple[WrapPlan, list[dict[str, Any]]]]:
    """The plan of each case, and what each rank measured."""
    plans = {}
    for name, trained, way in cases:
        model = build(name, lora=trained == "lora")
        plan = make_plan(model, FSDPParams(**WAYS[way]), world_size=2, example=Inputs(name).inputs())
        plans[f"{name} {trained} {way}"] = plan
    texts = {case: plan.to_json() for case, plan in plans.items()}
    first, second = on_ranks(measured, 2, texts, backend="one_thread_gloo")
    return {case: (plan, [first[case], second[case]]) for case, plan in plans.items()}


@pytest.fixture(scope="module")
def some_cases():
    return results_of(SOME)


@pytest.fixture(scope="module")
def other_cases():
    return results_of([case for case in ALL if case not in SOME])


def check_family(results: dict[str, tuple[WrapPlan, list[dict[str, Any]]]], name: str, trained: str) -> None:
    expected = two_steps(build(name, lora=trained == "lora"), [Inputs(name, seed=0), Inputs(name, seed=1)])
    ways = [way for way in WAYS if f"{name} {trained} {way}" in results]
    assert ways
    for way in ways:
        plan, ranks = results[f"{name} {trained} {way}"]
        check_ranks(ranks, plan, expected)
        for row in ranks:
            assert abs(estimate(plan, TrainParams(device="cpu")).peak_bytes / row["peak"] - 1) <= 0.05, way


@pytest.mark.real
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", SIX)
def test_a_family_on_two_ranks(some_cases, name, trained):
    check_family(some_cases, name, trained)


@pytest.mark.real
@pytest.mark.extended
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("name", SIX + OTHERS)
def test_other_families_and_ways_on_two_ranks(other_cases, name, trained):
    check_family(other_cases, name, trained)
