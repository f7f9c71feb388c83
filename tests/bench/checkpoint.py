"""`python -m tests.bench.checkpoint`: what saving costs the training, which waits for it or goes on; interleaved."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmfsdp.checkpoint import Background, latest, save
from mmfsdp.cli.bench_models import batch_of, build
from mmfsdp.cli.spawn_ranks import on_ranks
from mmfsdp.core.optimizer import build_optimizer
from mmfsdp.core.step import train_step
from mmfsdp.core.wrap import wrap_fsdp
from mmfsdp.params import FSDPParams, TrainParams

WAYS = ("no save", "sync", "async")


def bench_checkpoint(*, ranks: int = 2, every: int = 20, rounds: int = 3, width: int = 256) -> list[dict[str, Any]]:
    """Train a small Flamingo, saving every `every` steps: never, waiting for it, or with `train.async_save`. One row a
    way: median and mean seconds of a step (saves included), the mean as a ratio to no save; the same ratio of the
    processor seconds of rank 0 with all its threads, which hardly minds what else the machine does, and is what saving
    costs where no core is idle; seconds that a save keeps training waiting and that it takes, bytes of a checkpoint.
    width: of the model; its bytes grow with the square."""
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(_measure, ranks, folder, every, rounds, width)[0]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'':10}{'median step':>13}{'mean step':>11}{'ratio':>8}{'CPU ratio':>11}{'waits':>9}{'takes':>9}{'MB':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row['way']:<10}{row['median_s']:>11.3f} s{row['mean_s']:>9.3f} s{row['ratio']:>8.3f}"
            f"{row['cpu_ratio']:>11.3f}{row['waits_s']:>7.2f} s{row['takes_s']:>7.2f} s{row['bytes'] / 1e6:>8.1f}"
        )
    return "\n".join(lines)


def _measure(into: str, every: int, rounds: int, width: int) -> list[dict[str, Any]]:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    folder = Path(into)
    model = wrap_fsdp(build("flamingo", width), FSDPParams())
    optimizer, _ = build_optimizer(model, TrainParams())
    batch, beside = batch_of("flamingo", seed=dist.get_rank()), Background()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    waits: dict[str, list[float]] = {way: [0.0] for way in WAYS[:1]} | {way: [] for way in WAYS[1:]}
    takes: dict[str, list[float]] = {way: [0.0] for way in WAYS[:1]} | {way: [] for way in WAYS[1:]}
    cpu = dict.fromkeys(WAYS, 0.0)
    done: list[float] = []
    train_step(model, [batch], optimizer)
    for number, way in enumerate(way for _ in range(rounds) for way in WAYS):
        cpu[way] -= time.process_time()
        for step in range(every):
            start = time.perf_counter()
            train_step(model, [batch], optimizer)
            if way != WAYS[0] and not step:
                began = time.perf_counter()
                save(
                    folder / "checkpoints",
                    model=model,
                    step=number,
                    optimizer=optimizer,
                    keep_last=1,
                    background=beside if way == "async" else None,
                    done=lambda path: done.append(time.perf_counter()),
                )
                waits[way].append(time.perf_counter() - began)
            steps[way].append(time.perf_counter() - start)
        beside.settle(wait=True)
        cpu[way] += time.process_time()
        if way != WAYS[0]:
            takes[way].append(done[-1] - began)
        dist.barrier()
    size = sum(file.stat().st_size for file in latest(folder / "checkpoints").rglob("*"))
    plain = statistics.mean(steps[WAYS[0]])
    return [
        {
            "way": way,
            "median_s": statistics.median(steps[way]),
            "mean_s": statistics.mean(steps[way]),
            "ratio": statistics.mean(steps[way]) / plain,
            "cpu_ratio": cpu[way] / cpu[WAYS[0]],
            "waits_s": statistics.mean(waits[way]),
            "takes_s": statistics.mean(takes[way]),
            "bytes": size if way != WAYS[0] else 0,
        }
        for way in WAYS
    ]


if __name__ == "__main__":
    print(table(bench_checkpoint()))
