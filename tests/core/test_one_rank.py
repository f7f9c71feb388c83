"""One rank along the shard axis: frozen units are replicated, whatever their policy is."""

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mmfsdp.core.plan import UnitKind, WrapPlan
from mmfsdp.core.wrap import apply_plan
from mmfsdp.params import FrozenPolicy, FSDPParams, ParamError
from mmfsdp.planning import make_plan
from mmfsdp.predict import machine_of, meshes, on_mesh
from tests.bench.peaks import Case, Result, measure_all
from tests.parity import two_steps
from tests.tiny import tiny_batch, tiny_flamingo

REPLICATED = {
    "FSDP2": {},
    "FSDP2, kept, bf16": {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "bf16"},
    "FSDP2, nf4": {"frozen_dtype": "nf4", "mixed_precision": "bf16"},
    "FSDP1": {"backend": "FSDP1"},
}
SHARDED = {"rests in other bits than it computes in": {"frozen_dtype": "bf16"}, "offloaded": {"cpu_offload": True}}


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def policies(plan: WrapPlan) -> set:
    return {unit.frozen_policy for unit in plan.units if unit.kind is UnitKind.FROZEN and not unit.is_root}


def codes(plan: WrapPlan) -> list[str]:
    return [finding.code for finding in plan.lint]


def test_what_one_rank_learns_holds_and_sends_is_as_planned(one_rank):
    cases = [Case("flamingo", fields) for fields in (REPLICATED | SHARDED).values()]
    expected = two_steps(*cases[0].make())
    for name, case, row in zip(REPLICATED | SHARDED, cases, measure_all(cases), strict=True):
        plan = WrapPlan.from_json(row["plan"])
        result = Result(case, plan, [row])
        replicated = name in REPLICATED
        assert policies(plan) == {FrozenPolicy.REPLICATE if replicated else FrozenPolicy.SHARD}, name
        assert codes(plan) == ["one-shard"] * replicated, name
        assert abs(result.error) < 0.01, name
        assert row["parameters"] == result.cost.memory.parameters, name
        assert sum(sent_bytes for *_, sent_bytes in row["wire"]) == result.cost.wire_bytes == 0, name
        rel = 1e-5 if plan.mostly_fp32 and plan.fsdp.frozen_dtype is None else 0.05
        for ours, alone in zip(row["steps"], expected, strict=True):
            assert ours == pytest.approx(alone, rel=rel), name


def test_nothing_copies_a_frozen_weight(one_rank):
    model, example = tiny_flamingo(), tiny_batch().inputs()
    plan = make_plan(model, FSDPParams(), world_size=1, example=example)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    apply_plan(model, plan)
    assert frozen and all(model.get_parameter(name) is p for name, p in frozen.items())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in trained)
    of_frozen = [unit for unit in plan.units if unit.kind is UnitKind.FROZEN]
    assert not any(unit.gathers_forward or unit.gathers_backward for unit in of_frozen)


def test_a_plan_that_replicates_says_so_unless_that_was_asked_for():
    def plan(**fields):
        return make_plan(tiny_flamingo(), FSDPParams(**fields), world_size=4)

    one_shard = {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 1}
    hybrid = plan(**one_shard)
    assert policies(hybrid) == {FrozenPolicy.REPLICATE} and codes(hybrid) == ["one-shard"]
    assert "note: frozen_policy: SHARD is REPLICATE here" in " ".join(str(hybrid).split())
    assert codes(plan(**one_shard, frozen_policy="REPLICATE")) == []
    auto = FSDPParams(**one_shard, frozen_policy="AUTO", memory_budget_gib=1.0)
    chosen = make_plan(tiny_flamingo(), auto, world_size=4, example=tiny_batch().inputs())
    assert policies(chosen) == {FrozenPolicy.REPLICATE} and codes(chosen) == ["one-shard"]
    assert policies(plan()) == {FrozenPolicy.SHARD} and codes(plan()) == []
    with pytest.raises(ParamError, match="dp_shard: 1 leaves a plan nothing to shard"):
        meshes(hybrid, machine=machine_of("h100-nvlink"), tokens=1)
    assert policies(on_mesh(plan(), 2, 2)) == {FrozenPolicy.SHARD}
