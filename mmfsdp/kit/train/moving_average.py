"""MovingAverage: an exponential moving average of what trains (Polyak and Juditsky 1992), of each rank's own shards.

The average of a shard is the shard of the average, so no rank sends anything for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from ... import checkpoint
from ...checkpoint.tensors import Tensors, trained_tensors
from ...core.plan import WrapPlan
from ...core.reshard import reshard
from ...core.step import local_part
from ...params import ParamError

FIELD = "train.ema"


class MovingAverage:
    """The moving average of the trainable parameters of a wrapped model: `average = decay * average + (1 - decay) * p`.

    It begins with the weights as they are. It takes as much memory as the fp32 shards.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Raise ParamError for trainable parameters in 16 bits, whose average would not move."""
        reshard(model)  # after a forward without a backward, parameters may still be unsharded
        self._model = model
        self._decay = decay
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        check_dtypes({str(p.dtype).removeprefix("torch.") for p in self._parameters})
        self._averages = [shard.clone() for shard in self._shards()]

    def _shards(self) -> list[torch.Tensor]:
        return [local_part(p.detach()) for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take up the weights, after an optimizer step. Does not wait for the device."""
        torch._foreach_lerp_(self._averages, self._shards(), 1 - self._decay)  # one kernel for all

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchange the weights of the model for their averages, inside. Needs no more memory."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self._model)  # or the next forward would use what was gathered before
        for average, shard in zip(self._averages, self._shards(), strict=True):
            weights = shard.clone()
            shard.copy_(average)
            average.copy_(weights)

    def tensors(self) -> Tensors:
        """Return copies of the averages by name, sharded as the weights, for `checkpoint.save(more=...)`."""
        with self.in_model():
            return {name: tensor.detach().clone() for name, tensor in trained_tensors(self._model).items()}

    def load(self, folder: Path) -> None:
        """Take the averages of a checkpoint. A parameter without one there begins with its weights.

        Every rank must call it, after the model was loaded.
        """
        with self.in_model():
            checkpoint.load_average(self._model, folder)


def check_dtypes(dtypes: set[str]) -> None:
    """Raise ParamError if an average of parameters of these dtypes, by torch's names, would not move."""
    others = sorted(dtypes - {"float32", "float64"})
    if others:
        words = f"the weights that train are {others[0]} at rest, and an average in 16 bits loses the changes of a step"
        raise ParamError(FIELD, f"{words}; load them in fp32 (fsdp.mixed_precision still computes in 16 bits)")


def check_average(plan: WrapPlan) -> None:
    """Raise ParamError if the weights that train in a plan cannot be averaged."""
    check_dtypes({p.dtype for p in plan.by_name.values() if p.trainable})
