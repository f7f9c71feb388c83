"""The loop over steps: batches, steps, metrics, checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from .. import runs
from ..data.batch import Batch
from ..data.loader import batches, sum_up
from ..data.processor import Processor
from ..features import FeatureCache
from ..measure import Collectives, Counted, memory_bytes
from ..params import RunParams, TrainParams
from ..plan.lint import lint_media
from ..plan.units import stop_at_errors
from ..step import StepMetrics, build_optimizer, build_scaler, train_step
from .place import Place


def train(
    folder: Path,
    params: RunParams,
    model: nn.Module,
    processor: Processor,
    device: torch.device,
    frozen: dict[str, int],
    beat: runs.Beat,
    features: FeatureCache | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a wrapped model to the last step, from the newest checkpoint if there is one. Every rank must call it.

    frozen: checksums of the frozen weights as loaded. Asked to make room (runs.listen), all ranks save after the step
    in which one of them was, and raise runs.Preempted. Returns what this rank sent in the last step (for result.json),
    and what the data lacked by source, on all ranks since the run was taken up. Raises
    RuntimeError after `max_skipped` steps in a row whose loss or gradient was not finite.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = params.train
    optimizer, schedule = build_optimizer(model, settings)
    scaler = build_scaler(model)
    beat("taking up")
    place = Place.take_up(folder, params, model, optimizer, schedule, frozen, scaler)
    loader = batches(
        params.data,
        processor,
        batch_size=settings.batch_size,
        rank=rank,
        world_size=world,
        seed=settings.seed,
        start=place.samples // (world * settings.batch_size),
    )
    metrics = runs.MetricsWriter(folder, rank, after=place.step)
    sent = runs.last_row(folder, rank).get("wire_bytes", 0)
    wire: list[Counted] = []
    media: set[str] | None = None
    mark = {"resumed_from": place.step} if place.step else {}
    model.train()
    with Collectives() as collectives:
        while place.step < settings.steps:
            step = place.step + 1
            beat(f"step {step} data")
            start = time.perf_counter()
            micro_batches = loader.take(settings.accumulation)
            data_s = time.perf_counter() - start
            media = check_media(micro_batches, media)
            for line in loader.news():
                print(line)
            beat(f"step {step} compute")
            collectives.reset()
            if features is not None:
                micro_batches = features.fill(model, micro_batches)
            row = train_step(
                model,
                micro_batches,
                optimizer,
                schedule=schedule,
                max_grad_norm=settings.max_grad_norm,
                scaler=scaler,
                asked=runs.asked,
            )
            wire = collectives.rows()
            sent = sum(w.wire_bytes for w in wire)
            step_s = time.perf_counter() - start
            place.passed(samples=world * settings.batch_size * settings.accumulation, skipped=row.skipped)
            metrics.write(
                {"step": step, "time": time.time(), **row.to_dict(), "data_s": data_s, "step_s": step_s}
                | {"samples_per_s": row.samples / step_s, "tokens_per_s": row.tokens / step_s}
                | {"memory_bytes": memory_bytes(device), "wire_bytes": sent, "skipped_steps": place.skipped}
                | mark
            )
            mark = {}
            if rank == 0:
                report(row, step, settings, step_s)
            if place.skipped_in_a_row >= settings.max_skipped:
                raise RuntimeError(give_up(folder, micro_batches, place.skipped_in_a_row, step))
            preempted = row.asked and step < settings.steps
            if preempted or step == settings.steps or (settings.save_every and step % settings.save_every == 0):
                beat(f"step {step} save")
                place.save(folder, params, model, optimizer, schedule, frozen, scaler)
            place.settle(wait=preempted or step == settings.steps)
            if preempted:
                make_room(folder, step)
    if features is not None:
        print(f"vision features of {features.cached} pictures from the cache, {features.encoded} encoded")
    beat("trained")
    lacks: list[Any] = [None] * world
    dist.all_gather_object(lacks, loader.lacks)
    return {"wire_bytes_measured": sent, "wire_measured": [asdict(w) for w in wire]}, sum_up(lacks)


def check_media(batches: list[Batch], wanted: set[str] | None) -> set[str]:
    """The modalities that any rank's batches have: asked once (wanted None), of all ranks. Raises ParamError, naming
    this rank, for a batch without one of them: the others would wait for ever."""
    if wanted is None:
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, [list(batch.media) for batch in batches])
        wanted = {name for rank in of_all for names in rank for name in names}
    for batch in batches:
        stop_at_errors(lint_media(batch.media, wanted, rank=dist.get_rank()))
    return wanted


def report(row: StepMetrics, step: int, settings: TrainParams, seconds: float) -> None:
    """A line in rank 0's log at the first, the last and forty steps between, and at each that is skipped."""
    if row.skipped:
        print(f"step {step}/{settings.steps}  skipped: loss {row.loss:.4g}, grad norm {row.grad_norm:.4g}")
    elif step == 1 or step % max(1, settings.steps // 40) == 0 or step == settings.steps:
        print(f"step {step}/{settings.steps}  loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}  {seconds:.3f} s")


def make_room(folder: Path, step: int) -> NoReturn:
    """Leave word that the run was asked to make room, and has saved."""
    if dist.get_rank() == 0:
        text = f"preempted at step {step}, which is saved"
        print(text)
        runs.note(folder, "preempted", step=step, text=text)
    raise runs.Preempted(step)


def give_up(folder: Path, micro_batches: list[Batch], skipped: int, step: int) -> str:
    """Keep this rank's batches of a step for a look, and say why the run stops."""
    tensors: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(micro_batches):
        named = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
        tensors |= {f"{i}.{name}": t.cpu() for name, t in (named | batch.media).items() if t is not None}
    kept = folder / "bad_batch" / f"rank{dist.get_rank()}.safetensors"
    kept.parent.mkdir(exist_ok=True)
    save_file(tensors, kept)
    dist.barrier()  # for all to have kept theirs before the first that raises stops the others
    return (
        f"train.max_skipped: loss or gradient was not finite in {skipped} steps in a row, up to step {step}; they "
        f"changed no weights. Lower train.lr, or use bf16, not fp16; or look at the last batch of each rank: "
        f"safetensors.torch.load_file({str(kept)!r}) gives its tensors by micro-batch and name"
    )
