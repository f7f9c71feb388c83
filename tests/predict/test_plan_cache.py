"""What was recorded of a model is used again where it must be the same, and only there."""

import pytest
import torch
from torch import nn

from mmfsdp.kit.train import prepare
from mmfsdp.params import FSDPParams, TrainParams, load
from mmfsdp.planning import make_plan
from mmfsdp.predict import estimate, plan_cache
from mmfsdp.predict.plan_cache import NOT_RECORDED, PlanCache
from tests.tiny import tiny_batch, tiny_flamingo

TRAIN = TrainParams(device="cpu")


class Counted(PlanCache):
    """Knows how often it recorded."""

    @property
    def number(self) -> int:
        return len(self._recordings)


def layers() -> nn.Sequential:
    """Six layers, of which every third one trains."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(6)))
    for index, layer in enumerate(model):
        layer.requires_grad_(index % 3 == 1)
    return model


EACH_LAYER = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 64}
BATCH = {"input": torch.ones(4, 16)}


def test_policy_ranks_and_strategy_need_no_new_recording_and_the_plan_is_the_same():
    model, kept = layers(), Counted()
    choices = [
        *({"frozen_policy": policy} for policy in ("SHARD", "KEEP", "REPLICATE")),
        {"frozen_policy": "AUTO", "memory_budget_gib": 1.0},
        {"sharding_strategy": "SHARD_GRAD_OP"},
        {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 2},
        {"forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"},
        {"backend": "FSDP1"},
        {"backend": "FSDP1", "frozen_policy": "KEEP"},
    ]
    for fields in choices:
        fsdp = FSDPParams(**EACH_LAYER, **fields)
        for ranks in (2, 4):
            plan = make_plan(model, fsdp, world_size=ranks, example=BATCH, train=TRAIN, cache=kept)
            alone = make_plan(model, fsdp, world_size=ranks, example=BATCH, train=TRAIN)
            assert plan == alone and estimate(plan, TRAIN) == estimate(alone, TRAIN), fields
    assert kept.number == 2, "of FSDP2, and of FSDP1"


def test_one_recording_serves_every_policy_of_a_flamingo():
    model, kept, example = tiny_flamingo(), Counted(), tiny_batch().inputs()
    for fields in ({}, {"frozen_policy": "REPLICATE"}):
        plan = make_plan(model, FSDPParams(**fields), world_size=2, example=example, cache=kept)
    assert kept.number == 1
    assert plan == make_plan(model, FSDPParams(**fields), world_size=2, example=example)


def test_auto_needs_no_trace_of_its_own_after_a_plan_that_foresaw_it(monkeypatch):
    with_example = []
    group = plan_cache.trace_and_group

    def counting(model, params, example):
        with_example.append(example is not None)
        return group(model, params, example)

    monkeypatch.setattr(plan_cache, "trace_and_group", counting)
    prepare.kept_by_key.cache_clear()
    prepare.cache_by_key.cache_clear()
    *_, (plan, _) = prepare.previews(load("tiny"), for_auto=True)
    assert with_example == [False, True]
    auto = load("tiny").change(**{"fsdp.frozen_policy": "AUTO", "fsdp.memory_budget_gib": 1.0})
    *_, (plan, _) = prepare.previews(auto, for_auto=True)
    assert plan.why and with_example == [False, True]


def test_whatever_changes_what_is_computed_needs_a_new_recording():
    model, kept = layers(), Counted()
    changes = [
        ({}, BATCH),
        ({}, {"input": torch.ones(5, 16)}),
        ({}, {"input": torch.ones(4, 16, device="meta")}),
        ({"mixed_precision": "bf16"}, BATCH),
        ({"activation_checkpointing": "all"}, BATCH),
        ({"backend": "DDP"}, BATCH),
        ({"frozen_dtype": "bf16"}, BATCH),
    ]
    for number, (fields, example) in enumerate(changes, 1):
        fsdp = FSDPParams(**EACH_LAYER, **fields)
        for _ in range(2):
            plan = make_plan(model, fsdp, world_size=2, example=example, cache=kept)
        assert kept.number == number, fields
        assert plan == make_plan(model, fsdp, world_size=2, example=example)
    make_plan(model, FSDPParams(auto_wrap_policy="NO_WRAP"), world_size=2, example=BATCH, cache=kept)
    assert kept.number == len(changes) + 1, "another set of units"


def test_values_that_a_model_may_read_as_numbers_count_and_others_do_not():
    model, kept = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)), Counted()
    for number, ids in enumerate(([1, 2], [1, 3]), 1):
        make_plan(model, FSDPParams(), world_size=2, example={"input": torch.tensor([ids])}, cache=kept)
        assert kept.number == number
    model, kept = layers(), Counted()
    for value in (0.0, 1.0):
        example = {"input": torch.full((4, 16), value)}
        make_plan(model, FSDPParams(), world_size=2, example=example, cache=kept)
    assert kept.number == 1


def test_a_recording_of_another_freezing_is_not_used():
    model, kept = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))), Counted()
    example = {"input": torch.ones(2, 8)}
    for trainable in (0, 1):
        for index, layer in enumerate(model):
            layer.requires_grad_(index == trainable)
        make_plan(model, FSDPParams(auto_wrap_policy="NO_WRAP"), world_size=2, example=example, cache=kept)
    assert kept.number == 2


def test_the_oldest_recordings_are_dropped(monkeypatch):
    monkeypatch.setattr("mmfsdp.predict.plan_cache.MAX_KEPT", 2)
    model, kept = nn.Sequential(nn.Linear(8, 8)), Counted()
    for batch in (1, 2, 3):
        make_plan(model, FSDPParams(), world_size=2, example={"input": torch.ones(batch, 8)}, cache=kept)
    assert kept.number == 2


def test_fields_that_do_not_change_a_recording_exist():
    assert NOT_RECORDED <= FSDPParams.model_fields.keys()


def test_an_unusable_example_fails_each_time():
    model, kept = nn.Sequential(nn.Linear(8, 8)), Counted()
    for _ in range(2):
        with pytest.raises(ValueError, match="example"):
            make_plan(model, FSDPParams(), world_size=2, example={"input": torch.ones(1, 9)}, cache=kept)
    assert not kept.number
