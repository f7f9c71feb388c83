"""Frozen layers that follow each other are one unit (`frozen_unit_mib`) where that costs no peak."""

import pytest

from mmfsdp.kit.bench.bench_models import flamingo_batch, model_params, random_model
from mmfsdp.kit.train.fit_traces import RunPlans
from mmfsdp.kit.train.prepare import plan_for, preview
from mmfsdp.params import FSDPParams, ParamError, TrainParams, load
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate, machine_of
from mmfsdp.predict.larger_units import LARGER, NOT_LARGER
from mmfsdp.predict.memory_events import record_memory
from mmfsdp.predict.plan_cache import PlanCache

TRAIN = TrainParams(device="cpu")
ENCODER = "vision_encoder.visual.transformer.resblocks"
LAYERS = 6


@pytest.fixture(scope="module")
def planned():
    """Plans of a small Flamingo, whose encoder has six layers."""
    model, example, cache = (
        random_model(model_params(256, layers=4), meta=True),
        flamingo_batch(seed=0).inputs(),
        PlanCache(),
    )

    def plan(**fields):
        made = make_plan(model, FSDPParams(**fields), world_size=2, example=example, train=TRAIN, cache=cache)
        return made, record_memory(model, made, example)

    return plan


def gathers(plan):
    return sum(unit.gathers_forward + unit.gathers_backward for unit in plan.units)


def notes(plan):
    return [(finding.code, finding.message) for finding in plan.lint if "larger" in finding.code]


WAYS = {
    "shard": {},
    "keep": {"frozen_policy": "KEEP"},
    "bf16, recomputed": {"mixed_precision": "bf16", "activation_checkpointing": "all"},
    "prefetched": {"forward_prefetch": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_larger_units_are_gathered_at_once_and_cost_no_peak(planned, way):
    apart, _ = planned(**WAYS[way])
    layers = [unit for unit in apart.units if unit.name.startswith(ENCODER)]
    assert len(layers) == LAYERS and notes(apart) == []
    of_two = -(-2 * layers[0].unsharded_bytes // 2**20)
    for mib, units in ((of_two, LAYERS // 2), (1000, 1)):
        larger, recording = planned(**WAYS[way], frozen_unit_mib=mib)
        merged = [unit for unit in larger.units if unit.name.startswith(ENCODER)]
        assert len(merged) == units and len(larger.units) == len(apart.units) - LAYERS + units
        assert [name for unit in merged for name in unit.modules] == [unit.name for unit in layers]
        assert gathers(apart) - gathers(larger) == LAYERS - units
        before, after = estimate(apart, TRAIN), estimate(larger, TRAIN)
        assert after.peak_bytes <= before.peak_bytes and after.wire_bytes == before.wire_bytes
        assert larger.memory_events == recording.memory_events, "as if the example had run with these units"
        [(code, message)] = notes(larger)
        assert code == LARGER and f"{LAYERS} frozen units became {units}" in message


def test_units_are_only_as_large_as_the_peak_allows(planned):
    """AUTO has filled its budget."""
    auto = {"frozen_policy": "AUTO", "memory_budget_gib": 0.06}
    apart, _ = planned(**auto)
    larger, _ = planned(**auto, frozen_unit_mib=1000)
    assert estimate(larger, TRAIN).peak_bytes <= estimate(apart, TRAIN).peak_bytes <= 0.06 * 2**30
    [(code, message)] = notes(larger)
    assert code == LARGER and "would grow with larger ones" in message
    assert gathers(larger) < gathers(apart) and larger.why == apart.why


def test_the_plan_says_why_no_units_are_merged(planned):
    def reason(plan):
        [(code, message)] = notes(plan)
        assert code == NOT_LARGER
        return message.partition("are merged: ")[2]

    assert reason(planned(frozen_unit_mib=1)[0]) == "no two that follow each other have 1 MiB or less"
    assert "follow each other" in reason(planned(frozen_unit_mib=9, frozen_policy="REPLICATE")[0])
    assert "only an example" in reason(
        make_plan(random_model(model_params(64)), FSDPParams(frozen_unit_mib=9), world_size=2)
    )
    for backend in ("FSDP1", "DDP"):
        with pytest.raises(ParamError, match=f"frozen_unit_mib: .*cannot be honored by {backend}.*FSDP2"):
            FSDPParams(frozen_unit_mib=9, backend=backend)


def test_the_cockpit_the_ranks_and_fit_have_the_same_units():
    params = load("tiny").change(**{"fsdp.frozen_unit_mib": 100, "launch.ranks": 2, "train.device": "cpu"})
    shown, _ = preview(params)
    [(code, _)] = notes(shown)
    plans = RunPlans(params, machine_of("h100-nvlink"))
    of_ranks, _ = plan_for(plans.model, plans.params, plans.processor)
    of_fit, _ = plans.planned(plans.params)
    assert code == LARGER and shown.units == of_ranks.units == of_fit.units
