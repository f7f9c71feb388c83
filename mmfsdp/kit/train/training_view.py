"""TrainingView: what a person's callback sees of its training, and may ask of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.tensors import read_parameter
from ...params import RunParams
from ...params.base import without_controls
from .callbacks import Training

MAX_REASON = 300
"""Letters of a callback's reason to stop."""


class TrainingView:
    """A training, as a person's callback sees it: `on_train_begin(training)` gets one."""

    def __init__(self, training: Training, path: str) -> None:
        """path: the import path of the callback."""
        self._training = training
        self._path = path

    @property
    def model(self) -> nn.Module:
        """The wrapped model. This rank's parameters are shards, unless the backend is DDP."""
        return self._training.setup.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, of this rank's shards of what trains."""
        return self._training.setup.optimizer

    @property
    def params(self) -> RunParams:
        """The parameters of the run."""
        return self._training.setup.params

    @property
    def step(self) -> int:
        """The optimizer steps that are done."""
        return self._training.state.step

    def parameter(self, name: str) -> torch.Tensor:
        """Return a copy of a whole parameter. Every rank must call it, with the same name.

        name: before wrapping, as `model.freeze` has it. Raises ParamError for a name that there is not.
        """
        return read_parameter(self.model, name)

    def stop(self, reason: str) -> None:
        """End the run in good order after the next step: all ranks save, and the run is completed.

        One rank may call it alone: the others learn it in the next step. reason: in words, for the run's state.
        """
        words = " ".join(without_controls(str(reason)).split())[:MAX_REASON]
        self._training.stop_asked = self._training.stop_asked or f"{self._path}: {words}"
