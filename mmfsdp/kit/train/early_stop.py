"""Early stop: a run ends when the score of `train.keep_best` gets no better (Prechelt 1998)."""

from __future__ import annotations

import math
from typing import Any

from .callbacks import Callback, Training
from .checkpoints import score_to_keep


class EarlyStop(Callback):
    """Ends the run after `patience` evaluations in a row without a score that is better by more than `min_delta`."""

    def __init__(self, training: Training, patience: int) -> None:
        self._training = training
        self.patience = patience
        self.best: float | None = None
        """The last score that counted as better."""
        self.best_step = 0
        self.waited = 0
        """Evaluations since then."""

    def on_step_end(self, row: dict[str, Any]) -> None:
        """Look at the score of the row, if it has one. All ranks decide alike, so none need be asked."""
        training, train = self._training, self._training.setup.params.train
        score = score_to_keep(row, train)
        if score is None:
            return
        if math.isfinite(score) and (self.best is None or train.best_sign * (score - self.best) > train.min_delta):
            self.best, self.best_step, self.waited = score, row["step"], 0
            return
        self.waited += 1
        if self.waited >= self.patience and not training.stopped:
            words = f"{self.waited} evaluations without a better {train.best_name}"
            if self.best is not None:
                words += f" than {self.best:.4g} of step {self.best_step}"
            training.stopped = f"stopped by train.patience: {words}"

    def state_dict(self) -> dict[str, Any]:
        """Return the best score, its step, and the evaluations since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]


def training_early_stop(training: Training) -> EarlyStop | None:
    """Return the early stop of a training, if `train.patience` is set."""
    patience = training.setup.params.train.patience
    return EarlyStop(training, patience) if patience is not None else None
