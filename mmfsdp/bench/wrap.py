"""`mmfsdp bench wrap`: what each way to shard a mostly frozen model sends, holds and takes, in interleaved rounds."""

from __future__ import annotations

import gc
import statistics
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..checkpoint import count_changed, frozen_checksums
from ..data import Batch
from ..measure import Collectives, cpu_memory
from ..plots import compared
from ..step import train_step
from . import machine
from .models import batch_of, build
from .ranks import on_ranks
from .ways import CLIP, THEIRS, WAYS, Way, wrapped

SHARD = "frozen-aware SHARD"
FIGURES = (("wire_bytes", "sent in a step, MB", 1e6), ("peak_bytes", "peak memory, MB", 1e6), ("seconds", "step, s", 1))
"""Key of a row, what it is, and its unit."""


def bench_wrap(
    *,
    model: Literal["flamingo", "projector"] = "flamingo",
    ranks: int = 2,
    rounds: int = 7,
    width: int = 512,
    accumulation: int = 1,
) -> dict[str, Any]:
    """One optimizer step of each way: bytes sent, collectives, memory at rest and at its peak, median seconds, and how
    far gradient and clipped norm are from one process in fp32.

    model: flamingo (a quarter trains) or projector (an encoder-projector-LM model of which only the projector trains).
    width: of the language model; 512 makes about 50 M parameters. accumulation: micro-steps. rounds: timed steps.
    """
    found = on_ranks(_measure, ranks, model, rounds, width, accumulation, method="spawn")[0]
    found["title"] = (
        f"{model}, {found['parameters'] / 1e6:.1f} M parameters, {found['trainable'] / found['parameters']:.1%} of "
        f"them trainable; {ranks} ranks, {accumulation} micro-step{'s' * (accumulation > 1)}, bf16"
    )
    return found


def table(found: dict[str, Any]) -> str:
    """The rows as text, with ratios to the first."""
    rows = found["rows"]
    head = f"{'':30}{'sent MB':>9}{'x':>7}{'calls':>6}{'rest MB':>9}{'peak MB':>9}{'x':>6}{'seconds':>9}{'x':>6}"
    naive = next(row["gradient_crc"] for row in rows if row["way"] == THEIRS[2])
    lines = [found["title"], head + f"{'gradient':>10}{'=':>2}{'clipped':>9}{'frozen':>7}"]
    for row in rows:
        x = {key: row[key] / (rows[0][key] or 1) for key in ("wire_bytes", "peak_bytes")}
        lines.append(
            f"{row['way']:30}{row['wire_bytes'] / 1e6:>9.2f}{x['wire_bytes']:>7.4f}{row['collectives']:>6}"
            f"{row['rest_bytes'] / 1e6:>9.1f}{row['peak_bytes'] / 1e6:>9.1f}{x['peak_bytes']:>6.3f}"
            f"{row['seconds']:>9.3f}{row['ratio']:>6.3f}{row['gradient_error']:>10.1e}"
            f"{'=' if row['gradient_crc'] == naive else '':>2}"
            f"{row['clipped_norm'] / CLIP:>8.3f}x{row['frozen_changed']:>7}"
        )
    counting = found["counting"]
    return "\n".join(
        [
            *lines,
            "sent, rest, peak: of rank 0. x: to the first row; of seconds the median over rounds of the round's ratio.",
            "gradient: relative error beside one process in fp32; = where its bits are those of FSDP2 per layer.",
            "clipped: norm after clipping, over the true one. frozen: frozen parameters changed.",
            f"Counting collectives costs {counting['share']:.2%} of a step of {SHARD}: {counting['calls']} calls of "
            f"{counting['seconds_a_call'] * 1e6:.0f} microseconds more each.",
        ]
    )


def picture(found: dict[str, Any]) -> str:
    """The rows as SVG bars."""
    first = found["rows"][0]

    def ratio(row: dict[str, Any], key: str) -> float:
        return row["ratio"] if key == "seconds" else row[key] / (first[key] or 1)

    values = [(row["way"], [(row[key] / unit, ratio(row, key)) for key, _, unit in FIGURES]) for row in found["rows"]]
    labels = [label for _, label, _ in FIGURES]
    return compared(values, labels=labels, ours="frozen-aware", title=found["title"], notes=machine())


def _measure(kind: str, rounds: int, width: int, accumulation: int) -> dict[str, Any]:
    batches = [batch_of(kind, seed=10 * i + dist.get_rank()) for i in range(accumulation)]
    true = _true_gradient(kind, width, dist.get_world_size(), accumulation)
    ways, rows = [], []
    for name in WAYS:
        way, row = _first_steps(name, kind, width, batches, true)
        ways.append(way)
        rows.append(row)
    seconds = _timed(ways, batches, rounds)
    for row in rows:
        mine = seconds[row["way"]]
        ratio = statistics.median(a / b for a, b in zip(mine, seconds[WAYS[0]], strict=True))
        row |= {"seconds": statistics.median(mine), "ratio": ratio, "rounds": mine}
    counting = _cost_of_counting(next(row for row in rows if row["way"] == SHARD))
    sizes = [(p.numel(), p.requires_grad) for p in build(kind, width).parameters()]
    trainable = sum(n for n, trains in sizes if trains)
    dist.barrier()
    return {"rows": rows, "counting": counting, "parameters": sum(n for n, _ in sizes), "trainable": trainable}


def _timed(ways: Sequence[Way], batches: list[Batch], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each way in each round, after one that is not timed: in training, too, a step finds caches
    and memory as one of its own kind has left them. Every other round goes backwards, so that neighbors change."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for i in range(rounds):
        for way in ways[:: -1 if i % 2 else 1]:
            way.step(batches)
            dist.barrier()
            start = time.perf_counter()
            way.step(batches)
            dist.barrier()
            seconds[way.name].append(time.perf_counter() - start)
    return seconds


def _cost_of_counting(row: dict[str, Any]) -> dict[str, Any]:
    """What `Collectives` adds to a collective (one with oneself, of one number), times those of a step."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(alone, dist.ProcessGroup)
    number = torch.zeros(1)

    def called() -> float:
        start = time.perf_counter()
        dist.all_reduce(number, group=alone)
        return time.perf_counter() - start

    plain, counted = [], []
    for _ in range(200):
        plain.append(called())
        with Collectives():
            called()
            counted.append(called())
    extra = statistics.median(counted) - statistics.median(plain)
    calls = row["collectives"] + 2  # and the step's own sums: of tokens, of losses and norms
    return {"calls": calls, "seconds_a_call": extra, "share": calls * extra / row["seconds"]}


def _first_steps(
    name: str, kind: str, width: int, batches: list[Batch], true: dict[str, torch.Tensor]
) -> tuple[Way, dict[str, Any]]:
    """Wrap, look at one gradient, take two steps, and look at the second."""
    with cpu_memory() as memory:
        way = wrapped(name, build(kind, width), kind)
        before = frozen_checksums(way.model)
        error, norm, bits = _gradient(way, batches, true)
        way.step(batches)
        gc.collect()
        memory.mark()
        with Collectives() as counted:
            way.step(batches)
            rows = counted.rows()
    calls = [r for r in rows if r.phase != "control"]
    return way, {
        "way": name,
        "wire_bytes": sum(r.wire_bytes for r in calls),
        "collectives": sum(r.count for r in calls),
        "rest_bytes": memory.at_mark,
        "peak_bytes": memory.peak,
        "gradient_error": error,
        "gradient_crc": bits,
        "clipped_norm": norm,
        "frozen_changed": count_changed(before, frozen_checksums(way.model)),
    }


def _gradient(way: Way, batches: list[Batch], true: dict[str, torch.Tensor]) -> tuple[float, float, int]:
    """(relative error of the gradient, norm of the clipped one, checksum), at the first weights; ours take a step."""
    true = {name: g for name, g in true.items() if name not in way.left_frozen}
    mask, way.mask = way.mask, None
    way.backward(batches)
    way.mask = mask
    whole = _whole_gradients(way.model, true)
    wrong = sum(float((whole[n] - g).square().sum()) for n, g in true.items())
    error = (wrong / sum(float(g.square().sum()) for g in true.values())) ** 0.5
    bits = 0
    for g in whole.values():
        bits = zlib.crc32(g.numpy().tobytes(), bits)
    if way.mask is not None:
        way.mask()
        clipped = _norm(_whole_gradients(way.model, true))
        way.model.zero_grad()
        return error, clipped, bits
    way.model.zero_grad()
    said = train_step(way.model, batches, way.optimizer, max_grad_norm=CLIP).grad_norm
    return error, _norm(whole) * min(1.0, CLIP / said), bits


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return sum(float(g.square().sum()) for g in gradients.values()) ** 0.5


def _whole_gradients(model: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of all ranks' shards put together, in fp32, by the plain names."""
    found: dict[str, torch.Tensor] = {}
    fsdp1 = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
    with (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False) if fsdp1 else nullcontext()
    ):
        for name, p in model.named_parameters():
            name = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
            if name in wanted and p.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                found[name] = grad.detach().float().clone()
    return {name: found.get(name, torch.zeros_like(g)) for name, g in wanted.items()}


def _true_gradient(kind: str, width: int, ranks: int, accumulation: int) -> dict[str, torch.Tensor]:
    """One process over the batches of all ranks, fp32."""
    model = build(kind, width)
    shares = [(rank, i) for rank in range(ranks) for i in range(accumulation)]
    for rank, i in shares:
        (model(**batch_of(kind, seed=10 * i + rank).inputs()).loss / len(shares)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
