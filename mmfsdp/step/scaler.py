"""The loss scale of fp16."""

from __future__ import annotations

import torch
from torch import nn

from ..params import Precision
from .ranks import device_of


class Scaler:
    """The loss scale of fp16 (Micikevicius et al. 2018), with the constants and the growth of torch.amp.GradScaler.

    One for all ranks: whether a step overflowed is read off the global gradient norm, so that no rank decides alone
    and nothing more is sent. torch's own scalers refuse DTensors beside plain tensors, as REPLICATE makes them.
    """

    growth, backoff = 2.0, 0.5

    def __init__(self, device: torch.device | str = "cpu", *, scale: float = 2.0**16, interval: int = 2000) -> None:
        """interval: steps without an overflow after which the scale grows."""
        self.scale = torch.tensor(scale, device=device)
        self.interval = interval
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """After a step: grow or back off. Nobody waits for the device."""
        torch._amp_update_scale_(self.scale, self._steps, (~finite).float(), self.growth, self.backoff, self.interval)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, the same on every rank."""
        return {"scale": self.scale.item(), "growth_tracker": self._steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The way back from `state_dict`."""
        self.scale.fill_(state["scale"])
        self._steps.fill_(state["growth_tracker"])


def build_scaler(model: nn.Module) -> Scaler | None:
    """A new scaler for a model that computes in fp16 by its plan; None for others, which need none."""
    return Scaler(device_of(model)) if computes_in_fp16(model) else None


def computes_in_fp16(model: nn.Module) -> bool:
    """By its plan, if it has one."""
    plan = getattr(model, "mmfsdp_plan", None)
    return plan is not None and plan.fsdp.mixed_precision is Precision.FP16
