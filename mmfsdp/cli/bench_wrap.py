"""`mmfsdp bench wrap`: what each method to shard a mostly frozen model sends, holds and takes."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..core.step import train_step
from ..data import Batch
from .bench_models import CPU, MAX_NORM, METHODS, Method, batch_of, build, measure_step, seconds_of_steps, wrap_as
from .spawn_ranks import on_ranks

Gradients = dict[str, torch.Tensor]


def bench_wrap(
    *,
    model: Literal["flamingo", "projector"] = "flamingo",
    ranks: int = 2,
    rounds: int = 7,
    width: int = 512,
    accumulation: int = 1,
) -> dict[str, Any]:
    """Measure one optimizer step of each method: bytes sent, collectives, memory at rest and at its peak, median
    seconds, and how far gradient and clipped norm are from one process in fp32.

    model: flamingo (a quarter trains) or projector (an encoder-projector-LM model of which only the projector trains).
    width: of the language model; 512 makes about 50 M parameters. accumulation: micro-steps. rounds: timed steps.
    """
    result = on_ranks(_measure, ranks, model, rounds, width, accumulation, method="spawn")[0]
    micro_steps = "1 micro-step" if accumulation == 1 else f"{accumulation} micro-steps"
    result["title"] = (
        f"{model}, {result['parameters'] / 1e6:.1f} M parameters, {result['trainable'] / result['parameters']:.1%} of "
        f"them trainable; {ranks} ranks, {micro_steps}, bf16"
    )
    return result


def table(result: dict[str, Any]) -> str:
    """Return the rows as text, with ratios to the first."""
    rows = result["rows"]
    head = f"{'':30}{'sent MB':>9}{'x':>7}{'calls':>6}{'rest MB':>9}{'peak MB':>9}{'x':>6}{'seconds':>9}{'x':>6}"
    lines = [result["title"], head + f"{'gradient':>10}{'clipped':>9}"]
    for row in rows:
        sent_ratio = row["wire_bytes"] / (rows[0]["wire_bytes"] or 1)  # one rank sends nothing
        peak_ratio = row["peak_bytes"] / rows[0]["peak_bytes"]
        lines.append(
            f"{row['way']:30}{row['wire_bytes'] / 1e6:>9.2f}{sent_ratio:>7.4f}{row['collectives']:>6}"
            f"{row['rest_bytes'] / 1e6:>9.1f}{row['peak_bytes'] / 1e6:>9.1f}{peak_ratio:>6.3f}"
            f"{row['seconds']:>9.3f}{row['ratio']:>6.3f}{row['gradient_error']:>10.1e}"
            f"{row['clipped_norm'] / MAX_NORM:>8.3f}x"
        )
    lines += [
        "sent, rest, peak: of rank 0. x: to the first row; of seconds the median over rounds of the round's ratio.",
        "gradient: relative error beside one process in fp32. clipped: norm after clipping, over the one asked for.",
    ]
    return "\n".join(lines)


def _measure(kind: str, rounds: int, width: int, accumulation: int) -> dict[str, Any]:
    batches = [batch_of(kind, seed=10 * i + dist.get_rank()) for i in range(accumulation)]
    reference = _reference_gradients(kind, width, dist.get_world_size(), accumulation)
    methods, rows = [], []
    for name in METHODS:
        errors: dict[str, float] = {}

        def make(name: str = name, errors: dict[str, float] = errors) -> Method:
            method = wrap_as(name, build(kind, width), kind)
            errors["gradient_error"], errors["clipped_norm"] = _compare_gradient(method, batches, reference)
            return method

        method, row = measure_step(make, batches, CPU)
        methods.append(method)
        rows.append(row | errors)
    seconds = seconds_of_steps(methods, batches, rounds)
    for row in rows:
        own, first = seconds[row["way"]], seconds[METHODS[0]]
        row["seconds"] = statistics.median(own)
        row["ratio"] = statistics.median(a / b for a, b in zip(own, first, strict=True))
    parameters = list(build(kind, width).parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    dist.barrier()
    return {"rows": rows, "parameters": sum(p.numel() for p in parameters), "trainable": trainable}


def _compare_gradient(method: Method, batches: list[Batch], reference: Gradients) -> tuple[float, float]:
    """Return the relative error of the first gradient, and the norm of the clipped one. Ours take a step."""
    reference = {name: g for name, g in reference.items() if name not in method.left_frozen}
    for batch in batches:
        method.backward(batch, len(batches))
    gradients = _full_gradients(method.model, reference)
    difference = {name: gradients[name] - g for name, g in reference.items()}
    error = _norm(difference) / _norm(reference)
    if method.mask_and_clip is not None:
        method.mask_and_clip()
        clipped = _norm(_full_gradients(method.model, reference))
        method.model.zero_grad()
        return error, clipped
    method.model.zero_grad()
    reported = train_step(method.model, batches, method.optimizer, max_grad_norm=MAX_NORM).grad_norm
    return error, _norm(gradients) * min(1.0, MAX_NORM / reported)


def _norm(gradients: Gradients) -> float:
    return sum(float(g.square().sum()) for g in gradients.values()) ** 0.5


def _full_gradients(model: nn.Module, reference: Gradients) -> Gradients:
    """Return the gradients of all ranks' shards put together, in fp32, by the names of the model before wrapping."""
    full = {name: torch.zeros_like(g) for name, g in reference.items()}
    context: Any = nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        context = FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False)
    with context:
        for name, p in model.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            if name in full and p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                full[name] = grad.detach().float().clone()
    return full


def _reference_gradients(kind: str, width: int, ranks: int, accumulation: int) -> Gradients:
    """Return the gradients of one process over the batches of all ranks, in fp32."""
    model = build(kind, width)
    for rank in range(ranks):
        for i in range(accumulation):
            batch = batch_of(kind, seed=10 * i + rank)
            (model(**batch.inputs()).loss / (ranks * accumulation)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
