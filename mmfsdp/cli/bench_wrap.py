"""`mmfsdp bench wrap`: what each method to shard a mostly frozen model sends, holds and takes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..core.lint import plain_name
from ..core.step import train_step
from ..data import Batch
from ..run.state import text_table
from .bench_models import MAX_NORM, METHODS, Method, flamingo_batch, measure, model_params, random_model, wrap_as
from .spawn_ranks import on_ranks


def bench_wrap(*, ranks: int = 2, rounds: int = 7, width: int = 512) -> dict[str, Any]:
    """Measure one optimizer step of each method on a Flamingo of which a quarter trains: bytes sent, collectives,
    memory at rest and at its peak, median seconds, and the norm of the gradient after clipping.

    width: of the language model; 512 makes about 50 M parameters. rounds: timed steps.
    """
    result = on_ranks(_measure, ranks, rounds, width, method="spawn")[0]
    result["title"] = (
        f"{result['parameters'] / 1e6:.1f} M parameters, {result['trainable'] / result['parameters']:.1%} of them "
        f"trainable; {ranks} ranks, bf16"
    )
    return result


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [("", "sent MB", "calls", "rest MB", "peak MB", "seconds", "clipped norm")]
    for row in result["rows"]:
        sent = f"{row['wire_bytes'] / 1e6:.2f}"
        rest, peak = f"{row['rest_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 1e6:.1f}"
        clipped = f"{row['clipped_norm'] / MAX_NORM:.3f} x"
        lines.append((row["way"], sent, str(row["collectives"]), rest, peak, f"{row['seconds']:.3f}", clipped))
    about = "sent, rest, peak: of rank 0. clipped norm: of the gradient after clipping, over the one asked for."
    return "\n".join([result["title"], text_table(lines), about])


def _measure(rounds: int, width: int) -> dict[str, Any]:
    params, batch = model_params(width), flamingo_batch(seed=dist.get_rank())
    trainable: dict[str, int] = {}
    parameters = 0
    for name, p in random_model(params).named_parameters():
        parameters += p.numel()
        if p.requires_grad:
            trainable[name] = p.numel()
    clipped: dict[str, float] = {}

    def make(name: str) -> Method:
        method = wrap_as(name, random_model(params), batch.inputs())
        clipped[name] = _clipped_norm(method, batch, trainable)
        return method

    rows = measure(METHODS, make, batch, rounds)
    for row in rows:
        row["clipped_norm"] = clipped[row["way"]]
    dist.barrier()
    return {"rows": rows, "parameters": parameters, "trainable": sum(trainable.values())}


def _clipped_norm(method: Method, batch: Batch, names: dict[str, int]) -> float:
    """Return the norm of the first gradient after clipping, over what trains. Ours take a step."""
    method.model(**batch.inputs()).loss.backward()
    if method.mask_and_clip is not None:
        method.mask_and_clip()
        norm = _gradient_norm(method.model, names)
        method.model.zero_grad()
        return norm
    norm = _gradient_norm(method.model, names)
    method.model.zero_grad()
    reported = train_step(method.model, [batch], method.optimizer, max_grad_norm=MAX_NORM).grad_norm
    return norm * min(1.0, MAX_NORM / reported)


def _gradient_norm(model: nn.Module, names: dict[str, int]) -> float:
    """Return the norm of the gradients of these parameters, all ranks' shards put together."""
    context: Any = nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        context = FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False)
    squares = 0.0
    with context:
        for name, p in model.named_parameters():
            if plain_name(name).removeprefix("module.") in names and p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                squares += float(grad.float().square().sum())
    return squares**0.5
