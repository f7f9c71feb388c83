"""Wrapped on real ranks = one process: same losses, norms and weights; frozen untouched; traffic as predicted."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tiny import tiny_batch, tiny_flamingo

from mmfsdp.estimate import estimate
from mmfsdp.measure import Collectives
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.plan import make_plan
from mmfsdp.step import build_optimizer, train_step
from mmfsdp.wrap import apply_plan

TRAIN = TrainParams(steps=3, lr=1e-2, warmup_steps=1, weight_decay=0.1, max_grad_norm=0.5)
CASES = {
    "DDP": {"backend": "DDP"},
    "FSDP1 shard": {"backend": "FSDP1"},
    "FSDP1 keep": {"backend": "FSDP1", "frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"},
    "FSDP1 replicate": {"backend": "FSDP1", "frozen_policy": "REPLICATE"},
    "FSDP2 shard": {"backend": "FSDP2"},
    "FSDP2 keep": {"backend": "FSDP2", "frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"},
    "FSDP2 replicate": {"backend": "FSDP2", "frozen_policy": "REPLICATE", "sharding_strategy": "SHARD_GRAD_OP"},
    "FSDP2 checkpointed": {"backend": "FSDP2", "activation_checkpointing": "all"},
    "FSDP2 one unit": {"backend": "FSDP2", "auto_wrap_policy": "NO_WRAP"},
}


def micro_batches(step: int, rank: int, count: int) -> list:
    return [tiny_batch(2, seed=100 * step + 10 * i + rank) for i in range(count)]


def three_steps(model, batches) -> list[tuple[float, float]]:
    optimizer, schedule = build_optimizer(model, TRAIN)
    model.train()
    return [
        (m.loss, m.grad_norm)
        for step in range(3)
        for m in [train_step(model, batches(step), optimizer, schedule=schedule, max_grad_norm=0.5)]
    ]


def one_process(tied: bool, accumulation: int) -> list[tuple[float, float]]:
    def whole(step):
        return [b for i in range(accumulation) for b in (micro_batches(step, r, accumulation)[i] for r in range(2))]

    return three_steps(tiny_flamingo(tied=tied), whole)


def train_wrapped(fields: dict, tied: bool, accumulation: int) -> dict:
    rank = dist.get_rank()
    fsdp = FSDPParams(**fields)
    model = tiny_flamingo(tied=tied, seed=rank)  # each rank's own weights: rank 0's must win
    whole = {name: p.detach().clone() for name, p in tiny_flamingo(tied=tied).named_parameters()}
    plan = make_plan(model, fsdp, world_size=2, example=tiny_batch().inputs())
    model = apply_plan(model, plan)
    optimizer, schedule = build_optimizer(model, TRAIN)
    model.train()
    seen, rows = [], []
    with Collectives() as counted:
        for step in range(3):
            counted.reset()
            m = train_step(
                model, micro_batches(step, rank, accumulation), optimizer, schedule=schedule, max_grad_norm=0.5
            )
            rows = counted.rows()
            seen.append((m.loss, m.grad_norm))
    cost = estimate(plan, TrainParams(accumulation=accumulation))
    return {
        "seen": seen,
        "measured": sorted((r.kind, r.phase, r.count, r.wire_bytes) for r in rows),
        "predicted": sorted((w.kind, w.phase, w.count, w.wire_bytes) for w in cost.wire),
        "frozen": frozen_changed(model, whole),
        "frozen_grads": [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None],
        "state": optimizer_elements(optimizer),
        "wanted_state": 2 * trainable_elements(model),
    }


def frozen_changed(model, whole: dict) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    changed = []
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            now = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    else:
        now = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
    for name, p in tiny_names(model).items():
        value = now[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        same = torch.equal(value, whole[name])
        if same == p:  # a trainable one must change, a frozen one must not
            changed.append(name)
    return changed


def tiny_names(model) -> dict[str, bool]:
    return {
        n.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p.requires_grad
        for n, p in model.named_parameters()
    }


def optimizer_elements(optimizer) -> int:
    moments = (t for s in optimizer.state.values() for k, t in s.items() if k != "step")
    return sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in moments)


def trainable_elements(model) -> int:
    ps = (p for p in model.parameters() if p.requires_grad)
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in ps)


def every_case() -> dict:
    found = {}
    for tied, accumulation in ((False, 1), (True, 1), (False, 3)):
        for name, fields in CASES.items():
            found[f"{name}, tied={tied}, accumulation={accumulation}"] = train_wrapped(fields, tied, accumulation)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return on_ranks(every_case, 2)


KEYS = [f"{name}, tied={t}, accumulation={a}" for t, a in ((False, 1), (True, 1), (False, 3)) for name in CASES]


@pytest.mark.parametrize("key", KEYS)
def test_wrapped_equals_one_process(ranks, key):
    single = one_process("tied=True" in key, 3 if "accumulation=3" in key else 1)
    for rank in ranks:
        for (loss, norm), (loss1, norm1) in zip(rank[key]["seen"], single, strict=True):
            assert loss == pytest.approx(loss1, rel=1e-5)
            assert norm == pytest.approx(norm1, rel=1e-5)


@pytest.mark.parametrize("key", KEYS)
def test_only_what_trains_changes_and_costs(ranks, key):
    for rank in ranks:
        assert rank[key]["frozen"] == []
        assert rank[key]["frozen_grads"] == []
        assert rank[key]["state"] == rank[key]["wanted_state"]


@pytest.mark.parametrize("key", KEYS)
def test_predicted_traffic_is_measured_traffic(ranks, key):
    for rank in ranks:
        assert rank[key]["measured"] == rank[key]["predicted"]
