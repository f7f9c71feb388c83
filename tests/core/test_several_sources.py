"""Several sources in one step: each with its own batch size and weight, one optimizer step, on one process and two. And
what decays there, wrapped and not."""

from dataclasses import replace

import pytest
import torch
from torch.optim import SGD

from mmfsdp.checkpoint.tensors import model_tensors
from mmfsdp.core.names import plain_name
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.train.optimizer import build_optimizer
from mmfsdp.params import FSDPParams, TrainParams
from mmfsdp.planning import make_plan
from tests.parity import whole
from tests.ranks import on_ranks
from tests.tiny import tiny_batch, tiny_flamingo

WEIGHTS = {"data": 1.0, "data.more.0": 0.2}


def micro_batches(parts: int = 1, rank: int = 0) -> list:
    """Two micro-steps of two sources of 4 and 2 samples; or the part of one rank."""
    batches = []
    for seed in range(2):
        for (source, weight), size in zip(WEIGHTS.items(), (4, 2), strict=True):
            whole = tiny_batch(size, seed=seed + size)
            mine = slice(rank * size // parts, (rank + 1) * size // parts)
            cut = {name: getattr(whole, name)[mine] for name in ("input_ids", "attention_mask", "labels")}
            media = {"vision": whole.media["vision"][mine]}
            batches.append(replace(whole, **cut, media=media, weight=weight, source=source))
    return batches


def step(model, batches) -> dict:
    before = trained(model)
    metrics = train_step(model, batches, SGD([p for p in model.parameters() if p.requires_grad], lr=1.0))
    gradient = (before - trained(model)).tolist()
    return {"loss": metrics.loss, "norm": metrics.grad_norm, "losses": metrics.losses, "samples": metrics.samples,
            "gradient": gradient}  # fmt: skip


def trained(model) -> torch.Tensor:
    """All that trains, whole, one after the other."""
    return torch.cat([whole(t).detach().flatten() for _, t in sorted(model_tensors(model).items())])


def decays(model) -> dict[str, list[float]]:
    """The weight decay and the learning rate of each parameter."""
    rates = {"perceiver.*": 1e-3, "*.latents": 2e-3}
    optimizer, _ = build_optimizer(model, TrainParams(weight_decay=0.1, warmup_steps=0, lr_for=rates))
    names = {p: plain_name(name, model) for name, p in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        found |= {names[p]: [group["weight_decay"], group["lr"]] for p in group["params"]}
    return found


def on_a_rank(backend: str) -> dict:
    model = tiny_flamingo()
    params = FSDPParams(backend=backend)
    model = apply_plan(model, make_plan(model, params, world_size=2), device=torch.device("cpu"))
    return {"decays": decays(model)} | step(model, micro_batches(2, torch.distributed.get_rank()))


def every_backend() -> list[dict]:
    return [on_a_rank(backend) for backend in ("DDP", "FSDP1", "FSDP2")]


def test_the_loss_is_the_weighted_sum_of_the_sources_means():
    model, batches = tiny_flamingo(), micro_batches()
    found = step(tiny_flamingo(), batches)
    means = {}
    for source in WEIGHTS:
        own = [batch for batch in batches if batch.source == source]
        tokens = [int((batch.labels[:, 1:] != -100).sum()) for batch in own]
        losses = [model(**batch.inputs()).loss * n for batch, n in zip(own, tokens, strict=True)]
        means[source] = sum(losses) / sum(tokens)
    loss = sum(weight * means[source] for source, weight in WEIGHTS.items())
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["norm"] == pytest.approx(norm.item(), rel=1e-5) and found["samples"] == 12
    assert found["losses"] == pytest.approx({source: mean.item() for source, mean in means.items()}, rel=1e-6)


@pytest.mark.real
def test_two_ranks_make_the_step_of_one_process():
    alone = step(tiny_flamingo(), micro_batches())
    gradient, due = torch.tensor(alone["gradient"]), decays(tiny_flamingo())
    assert {name.rpartition(".")[2] for name, (decay, _) in due.items() if not decay} >= {"bias", "latents", "ff_gate"}
    assert {rate for _, rate in due.values()} == {1e-4, 1e-3, 2e-3}
    for rank in on_ranks(every_backend, 2):
        for found in rank:
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-6)
            assert (torch.tensor(found["gradient"]) - gradient).norm() < 1e-5 * gradient.norm()
            assert found["decays"] == due
