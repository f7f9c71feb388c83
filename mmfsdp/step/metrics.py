"""StepMetrics: what one optimizer step gave."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks. Reading a figure waits for the step's end on a GPU; holding does not."""

    figures: torch.Tensor
    """(5 + sources,) float64 on the CPU: loss, gradient norm before clipping, label tokens, samples, ranks that were
    asked to make room, and the loss of each source; with a scaler, its scale after them."""
    sources: tuple[str, ...]
    """Where in the parameters the sources of the step's batches stand."""
    lr: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    """Seconds of this rank's host; on a GPU work goes on after them."""
    arrived: torch.cuda.Event | None = None
    """When the figures have come from a GPU."""
    _read: list[float] = field(default_factory=list, repr=False)

    def _figure(self, place: int) -> float:
        if not self._read:
            if self.arrived is not None:
                self.arrived.synchronize()
            self._read.extend(self.figures.tolist())
        return self._read[place]

    @property
    def loss(self) -> float:
        """Mean over the label tokens of all ranks and micro-steps; of several sources, the weighted sum of theirs."""
        return self._figure(0)

    @property
    def losses(self) -> dict[str, float]:
        """The mean loss of each source, before its weight."""
        return {source: self._figure(5 + i) for i, source in enumerate(self.sources)}

    @property
    def grad_norm(self) -> float:
        """2-norm of the whole gradient, before clipping."""
        return self._figure(1)

    @property
    def tokens(self) -> int:
        """Label tokens of all ranks and micro-steps."""
        return int(self._figure(2))

    @property
    def samples(self) -> int:
        """Samples of all ranks and micro-steps."""
        return int(self._figure(3))

    @property
    def asked(self) -> bool:
        """A rank was asked to make room: all know it now."""
        return self._figure(4) > 0

    @property
    def loss_scale(self) -> float | None:
        """What the loss was multiplied by for backward; None without a scaler."""
        place = 5 + len(self.sources)
        return self._figure(place) if len(self.figures) > place else None

    @property
    def skipped(self) -> bool:
        """The loss or the norm was not finite, and no rank changed its weights."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def to_dict(self) -> dict[str, Any]:
        """The keys of a metrics line."""
        names = ("loss", "lr", "grad_norm", "samples", "tokens", "forward_s", "backward_s", "optimizer_s", "skipped")
        row = {name: getattr(self, name) for name in names}
        row |= {"losses": self.losses} if len(self.sources) > 1 else {}
        return row | ({"loss_scale": self.loss_scale} if self.loss_scale is not None else {})
