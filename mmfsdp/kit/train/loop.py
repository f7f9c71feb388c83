"""The loop over steps. What happens around a step is in callbacks.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ...core.collectives import gather_json
from ...core.freeze import train_mode
from ...core.step import train_step
from ..data.loader import Batches, batches, sum_skipped
from ..data.open_sources import Splits, open_for
from ..data.processor import SampleProcessor
from ..run.files.folder import add_event
from ..run.preempt import Preempted
from ..run.ranks.hang import Heartbeat
from .callbacks import Training
from .features import FeatureCache
from .handed_plan import RunPlan
from .step_rows import StepRows
from .train_state import TrainSetup, resume


def take_up(
    setup: TrainSetup,
    run_plan: RunPlan,
    processor: SampleProcessor,
    device: torch.device,
    beat: Heartbeat,
    features: FeatureCache | None = None,
    sources: Mapping[str, Splits] | None = None,
    loader: Batches | None = None,
) -> Training:
    """Return a training where it stands: at the newest checkpoint, if there is one. Every rank must call it.

    Args:
        setup: The wrapped model with its optimizer, schedule and loss scale.
        run_plan: Its plan, with the peak that was predicted.
        processor: The processor of its samples.
        device: The device of this rank.
        beat: Called with what this rank is about to do.
        features: The cache of the encoder's features, if there is one.
        sources: What `open_sources` gives. Default: they are opened here.
        loader: The loader of the phase before, which stands where that has ended. Default: a new one.

    Returns:
        The training, with the callbacks that hang on its loop.
    """
    beat("taking up")
    state, settings = resume(setup, of_phase_before=loader is not None), setup.params.train
    world_size = dist.get_world_size()
    if sources is None:
        sources = open_for(processor, setup.params)
    loader = loader or batches(
        setup.params.data,
        processor,
        batch_size=settings.batch_size,
        rank=dist.get_rank(),
        world_size=world_size,
        seed=settings.seed,
        start=state.samples // (world_size * settings.batch_size),  # from where the run stands in the data stream
        pin_memory=device.type == "cuda",
        sources=sources,
    )
    return Training(setup, state, run_plan, processor, sources, loader, device, beat, features)


def train(training: Training) -> dict[str, Any] | None:
    """Train to the last step from where the run stands, and return what goes into result.json. Every rank must call it.

    Returns None after the last step of a phase, which is saved: other parameters train from there on, so that the model
    must be wrapped again.
    A callback may end it earlier, on all ranks after the same step, which is saved: then the result says why, under
    `stopped`. Raises Preempted, on all ranks and after saving, if a signal asked any rank to stop
    (kit/run/preempt.py); and what a callback raises.
    """
    setup, state, callbacks = training.setup, training.state, training.callbacks
    settings, world_size = setup.params.train, dist.get_world_size()
    rows = StepRows(training)
    train_mode(setup.model)
    with callbacks.around_training():
        while not training.is_last(state.step) and state.step < training.end:
            step = state.step + 1
            training.beat(f"step {step} data")
            began = rows.begin()
            start = time.perf_counter()
            micro_batches = training.loader.take(settings.accumulation)
            data_s = time.perf_counter() - start

            training.beat(f"step {step} compute")
            with callbacks.around_step(step, micro_batches):
                metrics = train_step(
                    setup.model,
                    micro_batches,
                    setup.optimizer,
                    schedule=setup.schedule,
                    max_grad_norm=settings.max_grad_norm,
                    scaler=setup.scaler,
                    stop_requested=training.wants_to_stop,
                )
            state.step = step
            state.samples += world_size * settings.batch_size * settings.accumulation
            rows.add(metrics, began, {"data_s": data_s} | callbacks.after_step(step))
            if training.preempted and not training.is_last(step):
                raise preempted(training)
        if not training.is_last(state.step):
            return None
        training.beat("trained")
        skipped = gather_json({name: asdict(each) for name, each in training.loader.skipped.items()})
        result: dict[str, Any] = {"skipped": sum_skipped(skipped)}
        if state.began_with:
            result["began_with"] = state.began_with
        if training.stopped and state.step < settings.steps:
            result["stopped"] = stopped(training)
        callbacks.on_train_end(result)
    return result


def preempted(training: Training) -> Preempted:
    """Return the exception that ends the ranks of a preempted run; rank 0 says so."""
    step = training.state.step
    text = f"preempted at step {step}, which is saved"
    if dist.get_rank() == 0:
        print(text)
        add_event(training.setup.folder, "preempted", step=step, text=text)
    return Preempted(step)


def stopped(training: Training) -> str:
    """Return why a callback has ended the run; rank 0 says so."""
    step, text = training.state.step, training.stopped
    if dist.get_rank() == 0:
        print(f"{text}; the run ends after step {step}")
        add_event(training.setup.folder, "stopped", step=step, text=text)
    return text
