"""`python -m tests.bench.parity`: training on ranks equals one process, for every wrapper, strategy and policy."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmfsdp.checkpoint import count_changed, frozen_checksums
from mmfsdp.checkpoint.tensors import model_tensors
from mmfsdp.cli.bench_models import TOKENS, batch_of, build
from mmfsdp.cli.spawn_ranks import on_ranks
from mmfsdp.core.optimizer import build_optimizer, local_part
from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.planner import make_plan
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan, make_mesh
from mmfsdp.data import Batch
from mmfsdp.models import Flamingo, MultimodalModel
from mmfsdp.params import Backend, FSDPParams, TrainParams
from mmfsdp.train.job import quiet

TOLERANCE = 1e-5
"""Largest relative difference of a loss, a norm or the final weights (as one vector) in fp32."""
CLIP = 0.05
"""Below every norm that these models have, so that all steps are clipped."""
KINDS = {"Flamingo": "flamingo", "MultimodalModel": "projector"}
STEPS = 3
WIDTH = 32
"""Of the language model."""
POLICIES = ("SHARD", "KEEP", "REPLICATE")
TRAIN = TrainParams(steps=STEPS, lr=1e-2, warmup_steps=1, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """One way to train."""

    backend: str
    strategy: str = "FULL_SHARD"
    policy: str = "SHARD"
    accumulation: int = 1
    clip: float | None = None
    checkpointing: str = "none"
    model: str = "Flamingo"

    def params(self, ranks: int) -> FSDPParams:
        """How the case wraps."""
        mesh = {"dp_replicate": ranks // 2, "dp_shard": 2} if self.strategy.startswith("HYBRID") else {}
        values: dict[str, Any] = {"backend": self.backend, "sharding_strategy": self.strategy, **mesh}
        values |= {"memory_budget_gib": 1.0} if self.policy == "AUTO" else {}
        return FSDPParams(**values, frozen_policy=self.policy, activation_checkpointing=self.checkpointing)  # type: ignore[arg-type]

    def __str__(self) -> str:
        how = [self.model, self.backend] + ([self.strategy, self.policy] if self.backend != "DDP" else [])
        how += [f"{self.accumulation} micro-steps"] * (self.accumulation > 1)
        return " ".join(how + ["clipped"] * bool(self.clip) + ["recomputed"] * (self.checkpointing != "none"))


def cases(ranks: int) -> Iterator[Case]:
    """Every case that so many ranks can run."""
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP"] + ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] * (ranks % 2 == 0 < ranks - 2)
    ways = [("DDP", "FULL_SHARD", "SHARD"), ("FSDP1", "NO_SHARD", "SHARD"), ("FSDP2", "NO_SHARD", "SHARD")]
    ways += [*product(("FSDP1", "FSDP2"), strategies, POLICIES), *product(("FSDP2",), strategies, ("AUTO",))]
    for model, way, accumulation, clip, recomputed in product(KINDS, ways, (1, 2), (None, CLIP), ("none", "all")):
        yield Case(*way, accumulation, clip, recomputed, model)


def bench_parity(*, ranks: tuple[int, ...] = (2, 4), every: int = 1) -> list[dict[str, Any]]:
    """Train every case for three steps beside one process. One row a case: the largest relative differences of loss,
    norm and final weights; frozen parameters changed; rows of new tokens changed; bytes of optimizer states on all
    ranks; how many the last two should be; whether all that is as it must be. every: only each n-th case, for a quick
    look."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for count in ranks:
        chosen = list(cases(count))[::every]
        keys = {(case.model, case.accumulation, case.clip) for case in chosen}
        alone = {key: one_process(count, *key) for key in keys}
        rows += on_ranks(_rows, count, chosen, alone)[0]
    torch.set_num_threads(threads)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f"{'':2}{'ranks':>5}  {'case':<66}{'loss':>9}{'norm':>9}{'weights':>9}"
    head += f"{'frozen':>8}{'new rows':>10}{'state bytes':>13}"
    lines = [
        f"{'' if row['ok'] else '!':2}{row['ranks']:>5}  {row['case']:<66}{row['loss']:>9.1e}{row['norm']:>9.1e}"
        f"{row['weights']:>9.1e}{row['frozen_changed']:>8}{row['new_rows']:>6} of{row['new_rows_due']:>2}"
        f"{row['state_bytes']:>10}{row['state_bytes'] - row['state_bytes_due']:>+3}"
        for row in rows
    ]
    good = sum(row["ok"] for row in rows)
    return "\n".join([head, *lines, f"{good} of {len(rows)} equal one process within {TOLERANCE:g}"])


@dataclass(frozen=True)
class Training:
    """What three steps were like."""

    losses: list[float]
    norms: list[float]
    weights: torch.Tensor
    """All that trains, whole, one after the other."""
    new_rows: int
    """Rows of new tokens that changed."""
    state_bytes: int
    """Of the optimizer's states on this rank, step counters aside."""


def one_process(ranks: int, model: str, accumulation: int, clip: float | None) -> Training:
    """The batches of all ranks, in this process."""
    whole, start = _built(model)
    return _train(copy.deepcopy(whole), KINDS[model], start, list(range(ranks)), accumulation, clip)


@cache
def _built(model: str) -> tuple[Flamingo | MultimodalModel, dict[str, torch.Tensor]]:
    """A model, to be copied, and what trains of it."""
    whole = build(KINDS[model], WIDTH)
    return whole, _whole(whole)


def _rows(chosen: list[Case], alone: dict[tuple, Training]) -> list[dict[str, Any]]:
    quiet()
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    rows = []
    for i, case in enumerate(chosen, 1):
        rows.append(_compare(case, meshes, alone[case.model, case.accumulation, case.clip]))
        if dist.get_rank() == 0:
            print(f"{i}/{len(chosen)} {case}: {'equal' if rows[-1]['ok'] else 'differs'}", file=sys.stderr)
    return rows


def _compare(case: Case, meshes: dict[tuple[int, int], DeviceMesh], alone: Training) -> dict[str, Any]:
    ranks = dist.get_world_size()
    whole, start = _built(case.model)
    plan = make_plan(whole, case.params(ranks), world_size=ranks)
    model = apply_plan(copy.deepcopy(whole), plan, mesh=_mesh(plan, meshes))
    before = frozen_checksums(model)
    done = _train(model, KINDS[case.model], start, [dist.get_rank()], case.accumulation, case.clip)
    held = torch.tensor(done.state_bytes)
    dist.all_reduce(held)
    copies = ranks if plan.backend is Backend.DDP else plan.replicate
    row: dict[str, Any] = asdict(case) | {
        "case": str(case),
        "ranks": ranks,
        "loss": _apart(done.losses, alone.losses),
        "norm": _apart(done.norms, alone.norms),
        "weights": float((done.weights - alone.weights).norm() / alone.weights.norm()),
        "frozen_changed": count_changed(before, frozen_checksums(model)),
        "new_rows": done.new_rows,
        "new_rows_due": alone.new_rows,
        "state_bytes": int(held),
        "state_bytes_due": alone.state_bytes * copies,
    }
    near = max(row["loss"], row["norm"], row["weights"]) < TOLERANCE and not row["frozen_changed"]
    return row | {"ok": near and all(row[key] == row[f"{key}_due"] for key in ("new_rows", "state_bytes"))}


def _mesh(plan: WrapPlan, meshes: dict[tuple[int, int], DeviceMesh]) -> DeviceMesh:
    """One a shape: its groups' threads stay to the end of the process."""
    shape = (1, plan.world_size) if plan.backend is Backend.DDP else (plan.replicate, plan.shard)
    if shape not in meshes:
        meshes[shape] = make_mesh(plan, torch.device("cpu"))
    return meshes[shape]


def _train(
    model: nn.Module,
    kind: str,
    before: dict[str, torch.Tensor],
    shares: list[int],
    accumulation: int,
    clip: float | None,
) -> Training:
    """Three steps over the batches of the ranks in `shares`. before: what trains, as it was."""
    optimizer, schedule = build_optimizer(model, TRAIN)
    model.train()
    losses, norms = [], []
    for step in range(STEPS):
        seeds = [100 * step + 10 * i + rank for rank in shares for i in range(accumulation)]
        batches = [_ragged(batch_of(kind, seed=seed), seed) for seed in seeds]
        row = train_step(model, batches, optimizer, schedule=schedule, max_grad_norm=clip)
        losses.append(row.loss)
        norms.append(row.grad_norm)
    after = _whole(model)
    rows = [(after[name] != before[name]).any(dim=1).sum() for name in after if "new_tokens" in name]
    states = [t for state in optimizer.state.values() for key, t in state.items() if key != "step"]
    held = sum(local_part(t).nbytes for t in states)
    return Training(losses, norms, torch.cat([t.flatten() for t in after.values()]), int(sum(rows)), held)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all that trains, gathered."""
    tensors = sorted(model_tensors(model).items())
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors}


def _apart(these: list[float], those: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(these, those, strict=True))


def _ragged(batch: Batch, seed: int) -> Batch:
    """Return the batch with different numbers of label tokens in its samples and on the ranks."""
    for row in range(2):
        batch.labels[row, TOKENS - (seed + row) % 5 :] = -100
    return batch


if __name__ == "__main__":
    print(table(bench_parity()))
