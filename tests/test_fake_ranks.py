"""The same bytes at 8, 64 and 1,024 ranks: one process under torch's fake process group sends what was predicted.

DDP is missing: its reducer takes no reply from a fake group.
"""

import pytest
import torch.distributed as dist
from tiny import tiny_batch, tiny_flamingo
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.estimate import estimate
from mmfsdp.measure import Collectives
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.plan import make_plan
from mmfsdp.step import build_optimizer, train_step
from mmfsdp.wrap import apply_plan

KEPT = {"frozen_policy": "KEEP", "sharding_strategy": "SHARD_GRAD_OP"}
CASES = {
    "SHARD": {},
    "KEEP bf16": {**KEPT, "mixed_precision": "bf16"},
    "REPLICATE": {"frozen_policy": "REPLICATE"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "dp_shard": 4},
    "FSDP1": {"backend": "FSDP1"},
    "FSDP1 KEEP": {"backend": "FSDP1", **KEPT},
}


@pytest.fixture(params=[8, 64, 1024])
def ranks(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def test_bytes_at_any_number_of_ranks(ranks):
    for name, fields in CASES.items():
        plan = make_plan(tiny_flamingo(), FSDPParams(**fields), world_size=ranks, example=tiny_batch().inputs())
        model = apply_plan(tiny_flamingo(), plan)
        optimizer, _ = build_optimizer(model, TrainParams())
        with Collectives() as counted:
            train_step(model, [tiny_batch()], optimizer, max_grad_norm=1.0)
            found = sorted((r.kind, r.phase, r.count, r.bytes, r.wire_bytes) for r in counted.rows())
        wire = estimate(plan).wire
        assert found == sorted((w.kind, w.phase, w.count, w.bytes, w.wire_bytes) for w in wire), name
