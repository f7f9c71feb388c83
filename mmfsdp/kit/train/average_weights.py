"""The callback that keeps the moving average of a training's weights (`train.ema`)."""

from __future__ import annotations

from typing import Any

from ...checkpoint.steps import has_average
from .callbacks import Callback, Training
from .moving_average import MovingAverage


class AverageWeights(Callback):
    """Keeps the moving average of a training, which evaluations use."""

    def __init__(self, average: MovingAverage) -> None:
        self._average = average

    def after_step(self, step: int) -> dict[str, Any]:
        """Take up the weights of the step. A skipped step has not changed them."""
        self._average.update()
        return {}


def training_average(training: Training) -> AverageWeights | None:
    """Return the moving average of a training, if `train.ema` is set. Every rank must call it."""
    decay = training.setup.params.train.ema
    if decay is None:
        return None
    training.average = MovingAverage(training.setup.model, decay)
    resumed_from = training.state.resumed_from
    if resumed_from is not None and has_average(resumed_from):
        training.average.load(resumed_from)
    return AverageWeights(training.average)
