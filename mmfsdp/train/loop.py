"""The loop over steps: batches, steps, metrics, checkpoints; and the recorder of each step's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..core.collectives import gather_json
from ..core.step import StepMetrics, train_step
from ..data.loader import batches, sum_skipped
from ..data.processor import SampleProcessor
from ..estimate.wire import CollectiveCount
from ..models.media_model import train_mode
from ..params import TrainParams
from ..run.folder import MetricsWriter, add_event, last_row
from ..run.hang import Heartbeat
from ..run.preempt import Preempted, preemption_requested
from .evaluate import HeldOut
from .features import FeatureCache
from .meters import Collectives, PeakMemory
from .profile import StepProfile
from .train_state import TrainSetup, TrainState, resume

LOG_LINES = 40
"""Lines about steps in rank 0's log, but for the first step, the last one and skipped ones."""


def train(
    setup: TrainSetup,
    processor: SampleProcessor,
    device: torch.device,
    memory: PeakMemory,
    beat: Heartbeat,
    features: FeatureCache | None = None,
) -> dict[str, Any]:
    """Train a wrapped model to the last step, from the newest checkpoint if there is one. Every rank must call it.

    Returns what goes into result.json: bytes that this rank sent in the last step, and the records that the data could
    not use. Raises Preempted, on all ranks and after saving, if a signal asked any rank to stop (run.preempt); and
    RuntimeError after `max_skipped` steps in a row with a loss or gradient that is not finite.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    params, settings, model = setup.params, setup.params.train, setup.model
    beat("taking up")
    state = resume(setup)
    loader = batches(
        params.data,
        processor,
        batch_size=settings.batch_size,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
        start=state.samples // (world_size * settings.batch_size),  # from where the run stands in the data stream
        pin_memory=device.type == "cuda",
    )
    heldout = HeldOut.open(params, processor, loader.skipped)
    if heldout is not None and features is not None:  # encoded once
        heldout.batches = features.fill(model, heldout.batches)
    sent_bytes = last_row(setup.folder, rank).get("wire_bytes", 0)
    writer = MetricsWriter(setup.folder, rank, after=state.step)
    recorder = Recorder(settings, state, writer)
    profile = StepProfile(setup.folder, settings.profile, device)
    wire: list[CollectiveCount] = []
    train_mode(model)
    with Collectives() as collectives, profile:
        while state.step < settings.steps:
            step = state.step + 1
            last = step == settings.steps
            beat(f"step {step} data")
            start = time.perf_counter()
            micro_batches = loader.take(settings.accumulation)
            data_s = time.perf_counter() - start

            beat(f"step {step} compute")
            collectives.reset()
            if features is not None:
                micro_batches = features.fill(model, micro_batches)
            with memory.watch_step(model, setup.optimizer, micro_batches):
                metrics = train_step(
                    model,
                    micro_batches,
                    setup.optimizer,
                    schedule=setup.schedule,
                    max_grad_norm=settings.max_grad_norm,
                    scaler=setup.scaler,
                    stop_requested=preemption_requested,
                )
            state.step = step
            state.samples += world_size * settings.batch_size * settings.accumulation
            wire = collectives.rows()
            sent_bytes = sum(row.wire_bytes for row in wire)
            figures = {"data_s": data_s, "wire_bytes": sent_bytes, **memory.figures()}
            recorder.add(metrics, start, figures)

            recording = profile.step_done(before_writing=partial(beat, f"step {step} profile"))
            due = last or (heldout is not None and step % heldout.every == 0)
            # Not while steps are profiled, nor when a rank must stop soon.
            if heldout is not None and due and not recording and not metrics.stop_requested:
                beat(f"step {step} held-out samples")
                recorder.flush(lambda: heldout.loss(model))
            elif device.type != "cuda":
                recorder.flush()

            if last or recorder.preempted or (settings.save_every and step % settings.save_every == 0):
                recorder.flush()
                beat(f"step {step} save")
                state.save(setup)
            if state.background:
                state.background.settle(wait=last or recorder.preempted)  # raises the error of its save, if any
            if recorder.preempted and not last:
                text = f"preempted at step {step}, which is saved"
                if rank == 0:
                    print(text)
                    add_event(setup.folder, "preempted", step=step, text=text)
                raise Preempted(step)
    if features is not None:
        print(f"vision features of {features.cached} pictures from the cache, {features.encoded} encoded")
    beat("trained")
    skipped_records = gather_json({name: asdict(skipped) for name, skipped in loader.skipped.items()})
    return {
        "wire_bytes_measured": sent_bytes,
        "wire_measured": [asdict(row) for row in wire],
        "skipped": sum_skipped(skipped_records),
    }


@dataclass
class Recorder:
    """Writes this rank's metrics.

    On a GPU a step's figures are read after the next step was issued, so that the GPU never waits for the host.
    """

    settings: TrainParams
    state: TrainState
    writer: MetricsWriter
    preempted: bool = False
    """A rank was asked to stop. All ranks learn it in the same step."""
    done_at: float = 0.0
    """When the last step was done (time.perf_counter)."""
    _pending: tuple[StepMetrics, float, dict[str, Any]] | None = None

    def add(self, metrics: StepMetrics, start: float, figures: dict[str, Any]) -> None:
        """Add a step: its metrics, when it was begun, and further keys of its row. Raises as `flush`."""
        self.flush()
        self._pending = metrics, start, {"step": self.state.step, "time": time.time(), **figures}

    def flush(self, evaluate: Callable[[], float] | None = None) -> None:
        """Wait for the last step and write it, with the held-out loss that `evaluate` returns.

        Raises RuntimeError after `max_skipped` skipped steps in a row.
        """
        if self._pending is None:
            return
        metrics, start, figures = self._pending
        self._pending = None
        row = metrics.to_dict()  # waits
        # The host issues a step while a GPU still computes the one before.
        began, self.done_at = max(start, self.done_at), time.perf_counter()
        step_s = figures["step_s"] = self.done_at - began
        if evaluate is not None:
            figures["heldout_loss"] = evaluate()
        state = self.state
        state.skipped += metrics.skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if metrics.skipped else 0
        self.preempted = self.preempted or metrics.stop_requested
        row |= figures | {"samples_per_s": metrics.samples / step_s, "tokens_per_s": metrics.tokens / step_s}
        # The sums above are over all ranks. A rank with short texts shows here.
        row["rank_tokens_per_s"] = metrics.rank_tokens / step_s
        row |= {"skipped_steps": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
        self.writer.write(row)
        if dist.get_rank() == 0:
            log_step(metrics, figures, self.settings)
        if state.skipped_in_a_row >= self.settings.max_skipped:
            raise RuntimeError(
                f"train.max_skipped: loss or gradient was not finite in {state.skipped_in_a_row} steps in a row, up to "
                f"step {figures['step']}; they changed no weights. Lower train.lr, or use bf16, not fp16"
            )


def log_step(metrics: StepMetrics, figures: dict[str, Any], settings: TrainParams) -> None:
    """Print a line for the first step, the last one, LOG_LINES between, and each that is skipped or evaluated."""
    step, head = figures["step"], f"step {figures['step']}/{settings.steps}"
    if metrics.skipped:
        print(f"{head}  skipped: loss {metrics.loss:.4g}, grad norm {metrics.grad_norm:.4g}")
    elif step in (1, settings.steps) or step % max(1, settings.steps // LOG_LINES) == 0:
        print(f"{head}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  {figures['step_s']:.3f} s")
    if "heldout_loss" in figures:
        print(f"{head}  held-out loss {figures['heldout_loss']:.4f}")
