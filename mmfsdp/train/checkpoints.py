"""Checkpoints: when a run saves."""

from __future__ import annotations

from typing import Any

from .callbacks import Callback, Training


class Checkpoints(Callback):
    """Writes a checkpoint every `save_every` steps, after the last step, and before a preempted run ends."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def after_step(self, step: int) -> dict[str, Any]:
        """Raise the error of the checkpoint that is written in the background, if it had one."""
        if self._training.state.background:
            self._training.state.background.settle(wait=False)
        return {}

    def due(self, step: int) -> bool:
        """Return True if the step is followed by a checkpoint."""
        every = self._training.setup.params.train.save_every
        return self._training.ends or bool(every and step % every == 0)

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Save, unless another step was issued since."""
        training, step = self._training, self._training.state.step
        if row["step"] != step or not self.due(step):
            return
        training.beat(f"step {step} save")
        training.state.save(training.setup)
        if training.state.background and training.ends:
            training.state.background.settle(wait=True)
        training.callbacks.on_save(step)
