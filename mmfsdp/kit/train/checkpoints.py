"""Checkpoints: when a run saves, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.collectives import gather_json
from ...params import ParamError, TrainParams
from ...params.train import HELD_OUT_LOSS
from .callbacks import Callback, Training


class Checkpoints(Callback):
    """Writes a checkpoint every `save_every` steps, after the last step, and before a preempted run ends.

    With `keep_best`, also after each evaluation that is better than all before.
    """

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
        if row["step"] != step:
            return
        is_best = self.is_best(row)
        if not is_best and not self.due(step):
            return
        training.beat(f"step {step} save")
        training.state.save(training.setup, training.callbacks.state_dicts(), training.average)
        if training.state.background and training.ends:
            training.state.background.settle(wait=True)
        training.callbacks.on_save(step)

    def is_best(self, row: dict[str, Any]) -> bool:
        """Return True if the row has a better score than all before it, and note it. Every rank must call it."""
        train, state = self._training.setup.params.train, self._training.state
        score = score_to_keep(row, train)
        if score is None or not math.isfinite(score):
            return False
        if state.best and train.best_sign * score <= train.best_sign * state.best["score"]:
            return False
        state.best = {"step": row["step"], "name": train.keep_best, "score": score}
        return True

    def on_train_end(self, result: dict[str, Any]) -> None:
        """Add the best score to the result."""
        if self._training.state.best:
            result["best"] = self._training.state.best


def score_to_keep(row: Mapping[str, Any], train: TrainParams) -> float | None:
    """Return the score of `keep_best` in a row; None if nothing was evaluated. Every rank must call it, and gets rank
    0's, so that all decide alike.

    Raises ParamError if there is no score of this name.
    """
    scores = {HELD_OUT_LOSS: row.get(HELD_OUT_LOSS), **row.get("scores", {})}
    if train.keep_best is None or all(value is None for value in scores.values()):
        return None
    if train.best_name not in scores:
        raise ParamError("train.keep_best", f"{train.keep_best!r} is no score; choose {', '.join(scores)}")
    score: float = gather_json(scores[train.best_name])[0]
    return score
