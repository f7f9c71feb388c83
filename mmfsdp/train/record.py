"""Record: what each step gave, written as metrics once it is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from .. import runs
from ..data.batch import Batch
from ..params import TrainParams
from ..step import StepMetrics
from .place import Place


@dataclass
class Record:
    """Metrics of this rank, one row a step.

    On a GPU a step's figures are read after the next step has been given to it, so that it never waits for the host.
    """

    folder: Path
    settings: TrainParams
    device: torch.device
    place: Place
    metrics: runs.MetricsWriter
    more: dict[str, Any] = field(default_factory=dict)
    """For the next row: how this life of the run began."""
    asked: bool = False
    """A rank was asked to make room: all ranks learn it in the same step."""
    _held: tuple[StepMetrics, list[Batch], dict[str, Any]] | None = None

    def add(self, row: StepMetrics, batches: list[Batch], **figures: Any) -> None:
        """A step's metrics, this rank's batches, and what else its row says. Raises as `settle`."""
        before, self._held = self._held, (row, batches, {"step": self.place.step, "time": time.time()} | figures)
        if before is not None:
            self._write(*before)
        if self.device.type != "cuda":
            self.settle()

    def settle(self) -> None:
        """Wait for the last step and write it. Raises RuntimeError after `max_skipped` skipped steps in a row."""
        held, self._held = self._held, None
        if held is not None:
            self._write(*held)

    def _write(self, row: StepMetrics, batches: list[Batch], figures: dict[str, Any]) -> None:
        step_s = figures["step_s"]
        self.place.judge(skipped=row.skipped)
        self.asked = self.asked or row.asked
        rates = {"samples_per_s": row.samples / step_s, "tokens_per_s": row.tokens / step_s}
        self.metrics.write(row.to_dict() | figures | rates | {"skipped_steps": self.place.skipped} | self.more)
        self.more = {}
        if dist.get_rank() == 0:
            report(row, figures["step"], self.settings, step_s)
            if "heldout_loss" in figures:
                steps, seconds = self.settings.steps, figures["heldout_s"]
                print(f"step {figures['step']}/{steps}  held-out loss {figures['heldout_loss']:.4f}  {seconds:.3f} s")
        if self.place.skipped_in_a_row >= self.settings.max_skipped:
            raise RuntimeError(give_up(self.folder, batches, self.place.skipped_in_a_row, figures["step"]))


def report(row: StepMetrics, step: int, settings: TrainParams, seconds: float) -> None:
    """A line in rank 0's log at the first, the last and forty steps between, and at each that is skipped."""
    if row.skipped:
        print(f"step {step}/{settings.steps}  skipped: loss {row.loss:.4g}, grad norm {row.grad_norm:.4g}")
    elif step == 1 or step % max(1, settings.steps // 40) == 0 or step == settings.steps:
        print(f"step {step}/{settings.steps}  loss {row.loss:.4f}  grad norm {row.grad_norm:.3f}  {seconds:.3f} s")


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
        f"safetensors.torch.load_file({str(kept)!r}) gives its tensors by batch and name"
    )
