"""Frozen features, once: training with the cache gives bitwise the losses of training without, on real ranks."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tiny import MODEL, tiny_batch, tiny_flamingo

from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.evaluate import HeldOut
from mmfsdp.kit.train.features import FeatureCache, fingerprint
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import DataParams, FSDPParams, ParamError, RunParams, TrainParams
from mmfsdp.planning import make_plan

CPU = torch.device("cpu")
PICTURES = 6
"""Pictures of a rank's epoch; each step shows two of them and two others twice."""


def params_for(folder: Path | None, **fsdp) -> RunParams:
    return RunParams(
        model=MODEL, data=DataParams(feature_cache=None if folder is None else str(folder)), fsdp=FSDPParams(**fsdp)
    )


def step_batches(step: int, rank: int) -> list:
    """Two micro-batches of pictures that come again in every epoch, in another order and on either rank."""
    order = random.Random(step // 3).sample(range(2 * PICTURES), 2 * PICTURES)
    mine = [order[(4 * step + 2 * rank + i) % len(order)] for i in range(2)]
    pictures = torch.cat([tiny_batch(1, seed=i).media["vision"] for i in mine])
    others = torch.stack([pictures[:, 0], pictures[:, 0].roll(1, dims=0)], dim=1)
    return [replace(tiny_batch(2, seed=step + i), media={"vision": p}) for i, p in enumerate((pictures, others))]


def losses(folder: Path | None, steps: int = 5, **fsdp) -> dict:
    """Train a little. Losses and norms of each step, and how often the encoder was entered."""
    model = tiny_flamingo()
    params = params_for(folder, **fsdp)
    cache = FeatureCache.open(params, model, CPU)
    entered = []
    model.vision_encoder.visual.register_forward_hook(lambda *_: entered.append(1))
    model = apply_plan(model, make_plan(model, params.fsdp, world_size=dist.get_world_size()), device=CPU)
    optimizer, schedule = build_optimizer(model, TrainParams(steps=steps, warmup_steps=1, lr=1e-2))
    model.train()
    figures = []
    for step in range(steps):
        batches = step_batches(step, dist.get_rank())
        batches = batches if cache is None else cache.fill(model, batches)
        metrics = train_step(model, batches, optimizer, schedule=schedule, max_grad_norm=1.0)
        if cache:
            HeldOut(batches).loss(model)  # of features, too, and leaves no trace
        figures.append([metrics.loss, metrics.grad_norm])
    return {"figures": figures, "entered": len(entered), "cached": cache.cached if cache else 0}


def every_backend(folder: str) -> dict[str, dict]:
    kinds = {
        "DDP": {"backend": "DDP"},
        "FSDP1": {"backend": "FSDP1"},
        "SHARD": {"frozen_policy": "SHARD"},
        "REPLICATE": {"frozen_policy": "REPLICATE"},
    }
    found = {}
    for name, fsdp in kinds.items():
        cache = Path(folder) / name
        runs = {"without": losses(None, **fsdp), "cold": losses(cache, **fsdp), "warm": losses(cache, **fsdp)}
        dist.barrier()
        if dist.get_rank() == 0:  # some pictures are lost, some damaged: ranks that hit meet ranks that miss
            for i, file in enumerate(sorted(f for f in cache.rglob("*") if f.is_file())):
                file.unlink() if i % 5 == 0 else file.write_bytes(b"damaged") if i % 5 == 1 else None
        dist.barrier()
        found[name] = runs | {"damaged": losses(cache, **fsdp)}
    return found


@pytest.mark.real
def test_losses_are_bitwise_those_without_the_cache_and_the_encoder_is_skipped(tmp_path):
    ranks = on_ranks(every_backend, 2, str(tmp_path))
    for rank in ranks:
        for name, runs in rank.items():
            figures = [run["figures"] for run in runs.values()]
            assert all(one == figures[0] for one in figures), name
            entered = {kind: run["entered"] for kind, run in runs.items()}
            assert entered["without"] == 10 and entered["warm"] == 0, (name, entered)
            assert 0 < entered["cold"] < 10 and 0 < entered["damaged"] < 10
            assert runs["warm"]["cached"] == 5 * (2 + 4)
    for name, runs in ranks[0].items():
        assert all(run["entered"] == ranks[1][name][kind]["entered"] for kind, run in runs.items()), "all or none"


def test_another_encoder_precision_or_preprocessing_is_another_cache(tmp_path):
    model = tiny_flamingo()
    first = FeatureCache.open(params_for(tmp_path), model, CPU)
    assert first.folder == FeatureCache.open(params_for(tmp_path), tiny_flamingo(), CPU).folder
    assert first.folder != FeatureCache.open(params_for(tmp_path, mixed_precision="bf16"), model, CPU).folder
    assert first.folder != FeatureCache.open(params_for(tmp_path), tiny_flamingo(seed=1), CPU).folder
    with torch.no_grad():
        next(model.vision_encoder.parameters()).view(-1)[0] += 1e-3
    assert first.folder != FeatureCache.open(params_for(tmp_path), model, CPU).folder
    relu = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    gelu = torch.nn.Sequential(relu[0], torch.nn.GELU())
    assert fingerprint(relu) != fingerprint(gelu)
    batch = tiny_batch(2)
    first.fill(model, [batch])
    brighter = replace(batch, media={"vision": batch.media["vision"] * 1.01})
    first.fill(model, [batch, brighter])
    assert first.encoded == 4 and first.cached == 2
    shutil.rmtree(first.folder)
    first.fill(model, [batch])
    assert first.encoded == 6


def test_an_encoder_that_trains_or_augmentation_is_an_error(tmp_path):
    model = tiny_flamingo()
    model.vision_encoder.requires_grad_(True)
    with pytest.raises(
        ParamError, match="data.feature_cache: the vision encoder trains .vision_encoder.visual.*freeze vision_encoder"
    ):
        FeatureCache.open(params_for(tmp_path), model, CPU)
    assert FeatureCache.open(params_for(None), model, CPU) is None
    with pytest.raises(ParamError, match="feature_cache: with augment"):
        DataParams(augment=True, feature_cache="x")
