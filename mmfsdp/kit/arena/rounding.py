"""Frozen weights that a file rounds: how far they may be from the given ones, and what the model learns with them.

A file that keeps and sends frozen weights in 4 bits computes with rounded ones, so that its losses are not those of
`fully_shard`. Its ranks note the weights that the modules see. Here, in a process that has not imported the file, they
are held to the error of nf4, and the model is trained with them, without any sharding.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import torch

from ...params.findings import Finding
from ...quantized.nf4 import FORMAT
from . import model
from .ranks import LEARNING_RATE, STEPS

LEAST_BITS = 4
"""Of a rounded number. With fewer no file stays below the error that is allowed."""
TIMES_NF4 = 1.5
"""The error that is allowed, in errors of nf4: a file may cut blocks elsewhere. 3 bits have twice the error of 4."""


def rounded_weights(seen: dict[str, str]) -> tuple[dict[str, torch.Tensor], list[Finding]]:
    """Return the frozen weights that are not the given ones, by name, and what is wrong with the first that is wrong.

    seen: what rank 0 noted in `ranks.train`. A weight that it did not see is held to be the given one.
    """
    rounded: dict[str, torch.Tensor] = {}
    for name, p in given_model().named_parameters():
        if name not in seen:
            continue
        weight = torch.frombuffer(bytearray(b64decode(seen[name])), dtype=torch.float32).view_as(p)
        if torch.equal(weight, p):
            continue
        if p.requires_grad:
            words = f"{name} trains, and its values in the first forward are not the given ones"
            return {}, [
                Finding("error", "weights", words, "gather what trains as it is: only frozen weights may be rounded")
            ]
        error, allowed = relative_error(weight, p), TIMES_NF4 * nf4_error(p)
        if not error <= allowed:  # true for NaN, too
            words = f"{name} is {error:.0%} off in forward, and rounding to 4 bits may be {allowed:.0%} off"
            fix = "compare what your `fill` makes with the weight of the model before it was sharded"
            return {}, [Finding("error", "weights", words, fix)]
        rounded[name] = weight
    return rounded, []


def given_model() -> model.ArenaModel:
    """Return the model, and leave torch's generator as it is."""
    with torch.random.fork_rng(devices=[]):
        return model.build()


def relative_error(weight: torch.Tensor, given: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the given weight."""
    return ((weight - given).norm() / given.norm()).item()


@torch.no_grad()
def nf4_error(p: torch.Tensor) -> float:
    """Return the relative error of the package's nf4 for a parameter."""
    codes, scales = FORMAT.quantize(p.reshape(1, -1))
    return relative_error(FORMAT.dequantize(codes, scales, p.numel(), p.dtype).view_as(p), p)


def trained_alone(weights: dict[str, torch.Tensor], seed: int, world: int) -> list[dict[str, Any]]:
    """Train the model with other frozen weights as `ranks.train` does, in this process, without any sharding.

    Returns "losses" and "norms" for each rank, as they are measured on ranks.
    """
    net = given_model()
    for name, weight in weights.items():
        net.get_parameter(name).data.copy_(weight)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)
    losses: list[list[float]] = [[] for _ in range(world)]
    norms = []
    for step in range(STEPS + 1):
        for rank in range(world):
            if step == STEPS:  # which has two micro-batches
                net(**model.batch(seed, step + 1, rank)).backward()
            loss = net(**model.batch(seed, step, rank))
            loss.backward()
            losses[rank].append(loss.item())
        for p in trainable:
            assert p.grad is not None
            p.grad /= world
        norms.append(torch.stack([p.grad.norm() for p in trainable if p.grad is not None]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    return [{"losses": losses[rank], "norms": norms} for rank in range(world)]
