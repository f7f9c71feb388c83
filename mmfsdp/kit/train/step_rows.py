"""The row of metrics of each step: read from the device, written to the metrics file and the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...core.step import StepMetrics
from ...core.step_batch import StepBatch
from ...params import TrainParams
from ..data.batch import Batch
from ..run.error_kinds import with_reason
from ..run.files.folder import MetricsWriter
from ..run.files.reasons import SKIPPED_STEPS, Reason
from .callbacks import Callback, Training
from .optimizer import lr_factor

LOG_LINES = 40
"""Lines about steps in rank 0's log, but for the first step, the last one and skipped ones."""


Mark = float | torch.cuda.Event
"""A moment: time.perf_counter of the host, or an event on the timeline of a GPU."""


class StepRows:
    """Reads the rows of steps and hands them to the callbacks.

    On a GPU a step's figures are read after the next step was issued, so that the GPU never waits for the host.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.clock = StepClock(training.device)
        self._pending: tuple[StepMetrics, Mark, Mark, dict[str, Any]] | None = None

    def begin(self) -> Mark:
        """Return the mark of a step's beginning: call it before the step's data are loaded."""
        return self.clock.mark()

    def add(self, metrics: StepMetrics, began: Mark, figures: dict[str, Any]) -> None:
        """Add a step that was issued just now: its metrics, the mark of its beginning, and further keys of its row."""
        done = self.clock.mark()
        self.read()
        self._pending = metrics, began, done, {"step": self.training.state.step, "time": time.time(), **figures}
        if self.training.device.type != "cuda" or self.training.callbacks.due(self.training.state.step):
            self.read()

    def read(self) -> None:
        """Wait for the last step that was added, and hand its row to the callbacks."""
        if self._pending is None:
            return
        metrics, began, done, figures = self._pending
        self._pending = None
        row = metrics.to_dict()  # waits
        step_s = figures["step_s"] = self.clock.seconds(began, done)
        training, state = self.training, self.training.state
        state.skipped += metrics.skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if metrics.skipped else 0
        if metrics.stop_requested and not training.preempted and not training.stopped:
            training.count_votes()
        row |= figures | {"samples_per_s": metrics.samples / step_s, "tokens_per_s": metrics.tokens / step_s}
        # The sums above are over all ranks. A rank with short texts shows here.
        row["rank_tokens_per_s"] = metrics.rank_tokens / step_s
        row |= {"skipped_steps": state.skipped, "skipped_in_a_row": state.skipped_in_a_row}
        training.callbacks.on_step_end(row)


class StepClock:
    """Measures steps: on a GPU by the GPU's own clock, since the host issues a step before the last one is done.

    A mark is compared with its neighbor only, and never with the host's clock. `elapsed_time` is a float32 of
    milliseconds, which cannot tell 4 ms apart after ten hours, and the two clocks drift apart by seconds in a day.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark of this moment; on a GPU, of the moment when all that was issued up to now is done.

        If the GPU has nothing left to do, that is now. So a mark before a step is the end of the step before, or the
        time at which the host began to load data, whichever is later.
        """
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, began: Mark, done: Mark) -> float:
        """Return the seconds from a mark to the one after it. Waits for the GPU."""
        if isinstance(began, float):
            assert isinstance(done, float)
            return done - began
        assert not isinstance(done, float)
        done.synchronize()
        return began.elapsed_time(done) / 1e3  # from milliseconds


class LearningRates(Callback):
    """Adds the learning rate of each pattern of `train.lr_for` to the row of a step."""

    def __init__(self, params: TrainParams) -> None:
        self.params = params

    def after_step(self, step: int) -> dict[str, Any]:
        """Return the learning rates of the step."""
        factor = lr_factor(step - 1, self.params)
        return {f"lr {pattern}": lr * factor for pattern, lr in self.params.lr_for.items()}


def training_rates(training: Training) -> LearningRates | None:
    """Return the callback of a training that has learning rates by part, else None."""
    train = training.setup.params.train
    return LearningRates(train) if train.lr_for else None


class PaddingMeter(Callback):
    """Adds the share of this rank's positions that are padding to the row of a step."""

    def __init__(self, training: Training) -> None:
        self._positions = self._padded = 0

    @contextmanager
    def around_step(self, step: int, micro_batches: list[StepBatch]) -> Iterator[None]:
        """Count the positions of a step."""
        own = [batch for batch in micro_batches if isinstance(batch, Batch)]
        self._positions = sum(batch.input_ids.numel() for batch in own)
        self._padded = sum(batch.padded for batch in own)
        yield

    def after_step(self, step: int) -> dict[str, Any]:
        """Return the share; nothing for the batches of a processor of one's own."""
        return {"padding": self._padded / self._positions} if self._positions else {}


class MetricsFile(Callback):
    """Writes this rank's metrics, a line for each step."""

    def __init__(self, training: Training) -> None:
        self._writer = MetricsWriter(training.setup.folder, dist.get_rank(), after=training.state.step)

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Write a row."""
        self._writer.write(row)


class StepLog(Callback):
    """Prints a line for the first step, the last one, LOG_LINES between, and each that is skipped or evaluated."""

    rank0_only = True

    def __init__(self, training: Training) -> None:
        self.steps = training.setup.params.train.steps

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Print a line, if it is time for one."""
        step, head = row["step"], f"step {row['step']}/{self.steps}"
        if row["skipped_in_a_row"]:
            print(f"{head}  skipped: loss {row['loss']:.4g}, grad norm {row['grad_norm']:.4g}")
        elif step in (1, self.steps) or step % max(1, self.steps // LOG_LINES) == 0:
            print(f"{head}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  {row['step_s']:.3f} s")
        if "heldout_loss" in row:
            print(f"{head}  held-out loss {row['heldout_loss']:.4f}")
        if "scores" in row:
            print(f"{head}  " + "  ".join(f"{name} {value:.4g}" for name, value in row["scores"].items()))


class SkippedSteps(Callback):
    """Ends a run in which no step changes a weight."""

    def __init__(self, training: Training) -> None:
        self.limit = training.setup.params.train.max_skipped

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Raise RuntimeError after `max_skipped` skipped steps in a row."""
        if row["skipped_in_a_row"] >= self.limit:
            words = (
                f"train.max_skipped: loss or gradient was not finite in {row['skipped_in_a_row']} steps in a row, up "
                f"to step {row['step']}; they changed no weights. Lower train.lr, or use bf16, not fp16"
            )
            raise with_reason(RuntimeError(words), Reason(words, SKIPPED_STEPS))
