"""The loop over steps: batches, steps, metrics, checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .. import runs
from ..data.batch import Batch
from ..data.loader import batches, sum_up
from ..data.processor import Processor
from ..measure import Collectives, Counted, PeakMemory
from ..params import RunParams
from ..plan.lint import lint_media
from ..plan.units import stop_at_errors
from ..step import build_optimizer, build_scaler, train_step
from .features import FeatureCache
from .heldout import HeldOut
from .place import Learner, Place
from .profile import profiled
from .record import Record
from .startup import startup


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
    learner = Learner(folder, params, model, optimizer, schedule, build_scaler(model), frozen)
    beat("taking up")
    place = Place.take_up(learner)
    loader = batches(
        params.data,
        processor,
        batch_size=settings.batch_size,
        rank=rank,
        world_size=world,
        seed=settings.seed,
        start=place.samples // (world * settings.batch_size),
    )
    heldout = HeldOut.open(params, processor)
    if heldout is not None:
        check_media(heldout.batches, None)
        heldout.batches = features.fill(model, heldout.batches) if features else heldout.batches
    sent = runs.last_row(folder, rank).get("wire_bytes", 0)
    begins: dict[str, Any] = {"resumed_from": place.step} if place.step else {}
    record = Record(folder, settings, device, place, runs.MetricsWriter(folder, rank, after=place.step), begins)
    wire: list[Counted] = []
    media: set[str] | None = None
    model.train()
    held, profile = PeakMemory(device), profiled(folder, settings, device)
    with Collectives() as collectives, held, profile as stepped:
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
                scaler=learner.scaler,
                asked=runs.asked,
            )
            wire = collectives.rows()
            sent = sum(w.wire_bytes for w in wire)
            place.passed(samples=world * settings.batch_size * settings.accumulation)
            if beat.marks:
                record.more["startup"] = startup(folder, beat)
            figures = {"data_s": data_s, "step_s": time.perf_counter() - start, "wire_bytes": sent}
            figures["memory_bytes"] = held.bytes(model, optimizer)
            recording, last = stepped(), step == settings.steps
            if heldout and not recording and (last or step % heldout.every == 0) and not row.asked:
                beat(f"step {step} held-out samples")
                figures |= heldout.loss(model)
            record.add(row, micro_batches, **figures)
            save = record.asked or last or bool(settings.save_every and step % settings.save_every == 0)
            if save:
                record.settle()
                beat(f"step {step} save")
                place.save(learner)
            place.settle(wait=record.asked or last)
            if record.asked and not last:
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


def make_room(folder: Path, step: int) -> NoReturn:
    """Leave word that the run was asked to make room, and has saved."""
    if dist.get_rank() == 0:
        text = f"preempted at step {step}, which is saved"
        print(text)
        runs.note(folder, "preempted", step=step, text=text)
    raise runs.Preempted(step)
