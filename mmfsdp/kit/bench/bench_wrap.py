"""`mmfsdp bench wrap`: what each method to shard a mostly frozen model sends, holds and takes."""

from __future__ import annotations

from contextlib import nullcontext
from textwrap import fill
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...core.step import divisor_of_step
from ...predict.plan_cache import PlanCache
from ..data import Batch
from ..run.state import text_table
from ..spawn_ranks import on_ranks
from .bench_models import (
    MAX_NORM,
    METHODS,
    Method,
    flamingo_batch,
    measure,
    model_params,
    random_model,
    size_text,
    wrap_as,
)


def bench_wrap(*, ranks: int = 2, rounds: int = 7, width: int = 512) -> dict[str, Any]:
    """Measure one optimizer step of each method on a Flamingo, a quarter of which trains: bytes sent, collectives,
    memory at rest and at its peak, median seconds, and the norm of the gradient after clipping.

    width: of the language model; 512 makes about 50 M parameters. rounds: timed steps.
    """
    return on_ranks(_measure, ranks, rounds, width, method="spawn")[0]


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [("", "sent MB", "calls", "rest MB", "peak MB", "s", "norm")]
    for row in result["rows"]:
        sent = f"{row['wire_bytes'] / 1e6:.2f}"
        rest, peak = f"{row['rest_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / 1e6:.1f}"
        clipped = f"{row['clipped_norm'] / MAX_NORM:.3f} x"
        lines.append((row["way"], sent, str(row["collectives"]), rest, peak, f"{row['seconds']:.3f}", clipped))
    about = (
        "sent, rest, peak: of rank 0. s: median seconds of a step. norm: of the gradient after clipping, over the "
        "norm asked for."
    )
    return "\n".join([fill(result["title"], 80), text_table(lines), fill(about, 80)])


def _measure(rounds: int, width: int) -> dict[str, Any]:
    params, batch = model_params(width), flamingo_batch(seed=dist.get_rank())
    clipped: dict[str, float] = {}
    cache = PlanCache()

    def make(name: str) -> Method:
        method = wrap_as(name, random_model(params), batch.inputs(), cache=cache)
        clipped[name] = _clipped_norm(method, batch)
        return method

    rows = measure(METHODS, make, batch, rounds)
    for row in rows:
        row["clipped_norm"] = clipped[row["way"]]
    dist.barrier()
    title = f"{size_text(random_model(params, meta=True))}; {dist.get_world_size()} ranks, bf16"
    return {"title": title, "rows": rows}


def _clipped_norm(method: Method, batch: Batch) -> float:
    """Take a step. Return the norm of the gradient that the optimizer steps by, which is clipped."""
    norms: list[float] = []

    def note_norm(optimizer: Optimizer, *_: Any) -> None:
        norms.append(_gradient_norm(method) / divisor_of_step(optimizer))

    hook = method.optimizer.register_step_pre_hook(note_norm)
    method.step(batch)
    hook.remove()
    return norms[0]


def _gradient_norm(method: Method) -> float:
    """Return the norm of the gradients that the optimizer uses, all ranks' shards put together."""
    context: Any = nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in method.model.modules()):
        context = FullyShardedDataParallel.summon_full_params(method.model, with_grads=True, writeback=False)
    trained = set(method.optimizer.param_groups[0]["params"])
    squares = 0.0
    with context:
        for p in method.model.parameters():
            if p in trained and p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                squares += float(grad.float().square().sum())
    return squares**0.5
