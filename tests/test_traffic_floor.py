"""A step sends what its policy must send and not a byte more; and what it clips is what one process clips."""

from collections import Counter
from math import ceil

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from mmfsdp.cli.bench_models import batch_of, build
from mmfsdp.core.collectives import Collectives
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import plan_of, wrap_fsdp
from mmfsdp.estimate import estimate
from mmfsdp.params import FSDPParams

WIDTH, CLIP = 96, 0.01
KEPT = {"sharding_strategy": "SHARD_GRAD_OP"}
POLICIES = {
    "SHARD": {},
    "KEEP": {"frozen_policy": "KEEP", **KEPT},
    "REPLICATE": {"frozen_policy": "REPLICATE", **KEPT},
    "DDP": {"backend": "DDP"},
}
NO_GRADIENT_PASSES = ("vision_encoder.", "encoders.", "language_model.model.embed_tokens.")
LAST = ("language_model.model.norm.", "language_model.lm_head.")
"""What forward ends with and backward begins with: gathered once for both."""


def sent(kind: str, policy: str, micro_steps: int) -> dict:
    """Whole bytes by kind and phase in a later step, and what this rank sent."""
    fields = POLICIES[policy]
    model = wrap_fsdp(
        build(kind, WIDTH), FSDPParams(mixed_precision="bf16", **fields), example=batch_of(kind, seed=0).inputs()
    )
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    batches = [batch_of(kind, seed=10 * i + dist.get_rank()) for i in range(micro_steps)]
    for _ in range(1 + (policy == "DDP")):  # DDP tells the ranks of its buckets in the second
        train_step(model, batches, optimizer)
    with Collectives() as counted:
        train_step(model, batches, optimizer)
        rows = [r for r in counted.rows() if r.phase != "control"]
    found = {f"{r.kind} {r.phase}": r.bytes for r in rows}
    return found | {"sent": sum(r.wire_bytes for r in rows), "calls": sum(r.count for r in rows)}


def clipped(fields: dict | None) -> list[torch.Tensor]:
    """The gradients that the optimizer gets in fp32, from ranks or (without fields) one process with all batches."""
    model, found = build("flamingo", WIDTH), []
    ranks = [dist.get_rank()] if fields is not None else [0, 1]
    if fields is not None:
        model = wrap_fsdp(model, FSDPParams(**fields), example=batch_of("flamingo", seed=0).inputs())
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = SGD(trains, lr=0.01)

    def look(*_: object) -> None:
        grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in trains]
        found.extend(g.clone() for g in grads)

    optimizer.register_step_pre_hook(look)
    train_step(model, [batch_of("flamingo", seed=rank) for rank in ranks], optimizer, max_grad_norm=CLIP)
    return found


class Twice(nn.Module):
    """A trainable layer and a frozen one that both run twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5))
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        first, trained, frozen, between, last = self.layers
        return last(frozen(trained(between(frozen(trained(first(x)))))))


class UnderTwoNames(nn.Module):
    """A frozen block and an embedding that the model knows under two names each, as T5 does its own."""

    def __init__(self):
        super().__init__()
        self.embedding = self.also = nn.Embedding(16, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).requires_grad_(False)
        self.blocks = nn.ModuleList([self.block, nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))])

    def forward(self, x):
        x = self.block(self.also(x))
        for block in self.blocks:
            x = x + block(x)
        return x


def run_under_two_names(backend: str, policy: str) -> list:
    """Gathers and reductions, predicted and counted."""
    fields = {"backend": backend, "frozen_policy": policy}
    ids = torch.arange(4)[None]
    model = wrap_fsdp(UnderTwoNames(), FSDPParams(**fields), example={"x": ids})
    model(ids).sum().backward()
    with Collectives() as counted:
        model(ids).sum().backward()
        rows = [(r.kind, r.phase, r.count, r.bytes) for r in counted.rows()]
    cost = [w for w in estimate(plan_of(model)).wire if w.phase != "control"]
    return [sorted((w.kind, w.phase, w.count, w.bytes) for w in cost), sorted(rows)]


def run_twice(backend: str, policy: str) -> list:
    """Gathers and reductions, predicted and counted."""
    fields = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 200, "backend": backend, **POLICIES[policy]}
    model = wrap_fsdp(Twice(), FSDPParams(**fields), example={"x": torch.ones(3, 16)})
    with Collectives() as counted:
        model(torch.ones(3, 16)).sum().backward()
        rows = [(r.kind, r.phase, r.count, r.bytes) for r in counted.rows()]
    cost = [w for w in estimate(plan_of(model)).wire if w.phase != "control"]
    assert max(u.gathers_forward for u in plan_of(model).units) == (2 if policy == "SHARD" else 1)
    return [sorted((w.kind, w.phase, w.count, w.bytes) for w in cost), sorted(rows)]


def all_of_it(micro_steps: list) -> dict:
    found = {f"{kind} {policy} {k}": sent(kind, policy, k) for kind, policy, k in micro_steps}
    if dist.get_world_size() == 2:
        true = clipped(None)
        norm = torch.cat([g.flatten() for g in true]).norm()
        for policy in ("SHARD", "REPLICATE", "DDP"):
            ours = clipped(POLICIES[policy])
            far = torch.cat([(a - b).flatten() for a, b in zip(ours, true, strict=True)]).norm() / norm
            found[f"clipped {policy}"] = [(torch.cat([g.flatten() for g in ours]).norm() / norm).item(), far.item()]
        found["clipped"] = norm.item()
        ways = [(backend, policy) for backend in ("FSDP2", "FSDP1") for policy in ("SHARD", "KEEP")]
        found["twice"] = {" ".join(way): run_twice(*way) for way in ways}
        found["twice"] |= {f"two names {' '.join(way)}": run_under_two_names(*way) for way in ways}
    return found


def sizes(kind: str, ranks: int, *, padded: bool) -> Counter:
    """Parameters, and with `padded` what FSDP2 adds for equal shards: frozen without and with grad flow, trainable."""
    found: Counter = Counter()
    for name, p in build(kind, WIDTH).named_parameters():
        n = ranks * ceil(p.shape[0] / ranks) * (p.numel() // p.shape[0]) if padded else p.numel()
        found["T" if p.requires_grad else "Fe" if name.startswith(NO_GRADIENT_PASSES) else "Fb"] += n
        found["last"] += n * name.startswith(LAST)
    return found


def floors(kind: str, ranks: int) -> dict[str, int]:
    """Bytes of whole tensors that pass in a step, by policy."""
    n, plain = sizes(kind, ranks, padded=True), sizes(kind, ranks, padded=False)
    assert sum(n.values()) < 1.01 * sum(plain.values())  # padding is all that is between them
    return {
        "SHARD": 2 * n["Fe"] + 4 * n["Fb"] + 8 * n["T"] - 2 * n["last"],
        "KEEP": 2 * n["Fe"] + 2 * n["Fb"] + 6 * n["T"],
        "REPLICATE": 6 * n["T"],
        "DDP": 8 * plain["T"],
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_the_floor(ranks):
    kinds = ("flamingo", "projector")[: 3 - ranks // 2]
    cases = [(kind, policy, 1) for kind in kinds for policy in POLICIES]
    if ranks == 2:  # micro-steps cost nothing where units stay
        cases += [("flamingo", "KEEP", 3), ("flamingo", "REPLICATE", 3)]
    for found in on_ranks(all_of_it, ranks, cases):
        for kind, policy, k in cases:
            floor = floors(kind, ranks)[policy]
            assert found[f"{kind} {policy} {k}"]["sent"] == floor * (ranks - 1) // ranks, (kind, policy, k)
        for kind in kinds:
            n, shard = sizes(kind, ranks, padded=True), found[f"{kind} SHARD 1"]
            assert shard["all-gather backward"] == 2 * (n["Fb"] + n["T"] - n["last"])  # the tower is not gathered again
            assert shard["reduce-scatter backward"] == 4 * n["T"]  # no gradient of anything frozen
            assert found[f"{kind} REPLICATE 1"]["all-gather forward"] == 2 * n["T"]
            for policy in ("KEEP", "REPLICATE"):
                assert "all-gather backward" not in found[f"{kind} {policy} 1"]
        if ranks == 2:
            for way, (predicted, counted) in found["twice"].items():
                assert predicted == counted, way
            assert found["clipped"] == pytest.approx(CLIP, rel=1e-4)
            for policy in ("SHARD", "REPLICATE", "DDP"):
                norm, far = found[f"clipped {policy}"]
                assert abs(norm - 1) < 1e-5 and far < 1e-5, policy
