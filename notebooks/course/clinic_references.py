"""What one process with all ranks' data learns from the scripts of lesson 08: the checks compare with it."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .script import RANKS, original

Weights = dict[str, Tensor]


class Training(NamedTuple):
    """What came of a training."""

    losses: list[list[float]]
    """Of each rank's batches, (ranks, steps)."""
    weights: Weights
    norms: list[float]
    """Of the gradient in each step, before clipping."""
    held_out: list[tuple[float, float]] = []
    """The loss of held-out data before and after each step."""


@cache
def parts_of(number: int) -> dict[str, Any]:
    """Return the functions of a script as it ships."""
    return runpy.run_path(str(original(number)))


def batches_of(number: int, moved: bool) -> Callable[[int, int], Any]:
    """Return a script's `batch_of`; moved: as its second run has it, see script_rank.run_moved."""
    script = parts_of(number)
    if not moved:
        return script["batch_of"]
    return lambda step, rank: script["batch_of"](script["STEPS"] - 1 - step, RANKS - 1 - rank)


def weights_of(model: nn.Module) -> Weights:
    """Return a model's parameters, a tied one by each of its names."""
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """Return the optimizer of most scripts."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(
    model: nn.Module,
    losses_of: Callable[[int], Sequence[Tensor]],
    *,
    steps: int,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], Any] | None = None,
    evaluate: Callable[[], float] | None = None,
) -> Training:
    """Train in one process, each step with the mean of all ranks' losses. losses_of: the losses of a step, by rank."""
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    norms: list[float] = []
    held_out = []
    for step in range(steps):
        parts = losses_of(step)
        optimizer.zero_grad()
        torch.stack(list(parts)).mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(nn.utils.get_total_norm(gradients).item())
        if clip is not None:
            clip()
        before = evaluate() if evaluate is not None else 0.0
        optimizer.step()
        held_out.append((before, evaluate() if evaluate is not None else 0.0))
        for rank, loss in enumerate(parts):
            losses[rank].append(loss.item())
    return Training(losses, weights_of(model), norms, held_out)


@cache
def text_only(moved: bool = False) -> Training:
    """Return the training of script 1."""
    script, batch_of = parts_of(1), batches_of(1, moved)
    model = script["build"]()
    return train(
        model,
        lambda step: [model(*batch_of(step, rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=sgd(model),
    )


@cache
def with_evaluation() -> Training:
    """Return the training of script 2."""
    script = parts_of(2)
    model, batch_of = script["build"](), script["batch_of"]

    def evaluate() -> float:
        with torch.no_grad():
            parts = [model(**batch_of(0, rank, held_out=True)).item() for rank in range(RANKS)]
        return sum(parts) / RANKS

    return train(
        model,
        lambda step: [model(**batch_of(step, rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=script["make_optimizer"](model),
        evaluate=evaluate,
    )


@cache
def frozen_layers() -> Training:
    """Return the training of script 3."""
    script = parts_of(3)
    model = script["build"]()
    random = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]
    return train(
        model,
        lambda _: [model(torch.randint(script["WORDS"], (8, 16), generator=each)) for each in random],
        steps=script["STEPS"],
        optimizer=sgd(model),
    )


def left_out(way: str, moved: bool = False) -> Weights:
    """Return the weights of script 4, where what the damaged batch does is one of:

    all: no rank takes this step; rank: the damaged batch has a gradient of zero; row: only the damaged row is left
    out; zeros: the same, and the mean is over all rows; target: the damaged row has a target of 0; never: training ends
    at that step.
    """
    script, batch_of = parts_of(4), batches_of(4, moved)
    model = script["build"]()
    optimizer = sgd(model)
    for step in range(script["STEPS"]):
        losses = []
        for rank in range(RANKS):
            x, y = batch_of(step, rank)
            good = torch.isfinite(y).flatten()
            if not good.all() and way in ("all", "rank", "never"):
                continue
            squares = (model(x) - y.nan_to_num()).square()
            kept = squares if way == "target" else squares[good]
            losses.append(kept.sum() / (len(y) if way == "zeros" else len(kept)))
        if len(losses) < RANKS and way == "never":
            break
        if len(losses) < RANKS and way == "all":
            continue
        optimizer.zero_grad()
        (torch.stack(losses).sum() / RANKS).backward()
        optimizer.step()
    return weights_of(model)


@cache
def evaluated_texts() -> Training:
    """Return the training of script 5."""
    script = parts_of(5)
    model, texts = script["build"](), script["texts"]

    def evaluate() -> float:
        with torch.no_grad():
            return (model(texts(1000)).item() + model(texts(1001)).item()) / 2

    return train(
        model,
        lambda step: [model(texts(100 * step + rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=sgd(model),
        evaluate=evaluate,
    )


@cache
def clipped(way: str) -> Training:
    """Return the training of script 6, clipped by the norm of all layers (all), or not (none)."""
    script = parts_of(6)
    model, limit = script["build"](), script["LIMIT"]

    def losses_of(step: int) -> list[Tensor]:
        batches = [script["batch_of"](step, rank) for rank in range(RANKS)]
        return [(model(x) - y).square().mean() for x, y in batches]

    def clip() -> None:
        if way == "all":
            nn.utils.clip_grad_norm_(model.parameters(), limit)

    return train(model, losses_of, steps=script["STEPS"], optimizer=sgd(model), clip=clip)


@cache
def decayed() -> Training:
    """Return the training of script 7."""
    script = parts_of(7)
    model, optimizer = script["build"]()
    return train(
        model,
        lambda _: [model(*script["batch_of"](rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=optimizer,
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 10.0),
    )


@cache
def cross_attention(way: str) -> Training:
    """Return the training of script 8, where the decoder is frozen (frozen), has gradients of its own in each step
    (cleared), or is trained (trained); or the gradient is not clipped (unclipped)."""
    script = parts_of(8)
    model = script["build"]()
    if way in ("frozen", "unclipped"):
        model.decoder.requires_grad_(False)
    trained = model if way == "trained" else model.cross_attention

    def losses_of(_: int) -> list[Tensor]:
        model.zero_grad()
        return [model(*script["batch_of"](rank)) for rank in range(RANKS)]

    limit = float("inf") if way == "unclipped" else script["LIMIT"]
    return train(
        model,
        losses_of,
        steps=script["STEPS"],
        optimizer=torch.optim.SGD(trained.parameters(), lr=0.2),
        clip=lambda: nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], limit),
    )


@cache
def without_pictures(moved: bool = False) -> Training:
    """Return the training of script 9."""
    script, batch_of = parts_of(9), batches_of(9, moved)
    model = script["build"]()
    return train(
        model,
        lambda step: [model(**batch_of(step, rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=script["make_optimizer"](model),
    )


@cache
def tied() -> Training:
    """Return the training of script 10."""
    script = parts_of(10)
    model = script["build"]()
    return train(
        model,
        lambda step: [model(script["texts"](step, rank)) for rank in range(RANKS)],
        steps=script["STEPS"],
        optimizer=sgd(model),
    )


@cache
def uneven(way: str) -> Weights:
    """Return the weights of script 11, where all rows count the same (same), or the last batch is left out (dropped),
    or each rank gives the sum over its rows (sum), or that sum over the rows of all ranks (half)."""
    script = parts_of(11)
    model = script["build"]()
    x, y = script["dataset"]()
    optimizer = sgd(model)
    for _ in range(script["EPOCHS"]):
        for batch in torch.arange(script["ROWS"]).split(script["BATCH"]):
            if way == "dropped" and len(batch) < script["BATCH"]:
                continue
            optimizer.zero_grad()
            factor = {"sum": len(batch) / RANKS, "half": 1 / RANKS}.get(way, 1.0)
            (factor * (model(x[batch]) - y[batch]).square().mean()).backward()
            optimizer.step()
    return weights_of(model)


@cache
def unbroken(way: str) -> Training:
    """Return the training of script 12, never stopped (all), or one of which only the weights or only the optimizer's
    state are restored (weights, optimizer)."""
    script = parts_of(12)

    def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = script["Model"]()
        return net, torch.optim.AdamW(net.parameters(), lr=0.02)

    def part(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> Training:
        return train(
            net,
            lambda step: [net(*script["batch_of"](first + step, rank)) for rank in range(RANKS)],
            steps=last - first,
            optimizer=optimizer,
        )

    model, optimizer = plain(0)
    begin = part(model, optimizer, 0, script["STOP_AT"])
    if way != "all":
        weights, moments = model.state_dict(), optimizer.state_dict()
        model, optimizer = plain(1)
        if way == "weights":
            model.load_state_dict(weights)
        else:
            optimizer.load_state_dict(moments)
    end = part(model, optimizer, script["STOP_AT"], script["STEPS"])
    losses = [first + second for first, second in zip(begin.losses, end.losses, strict=True)]
    return Training(losses, end.weights, begin.norms + end.norms)
