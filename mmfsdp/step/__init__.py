"""The optimizer, its schedule, and one training step."""

from .core import train_step
from .metrics import StepMetrics
from .optimizer import LocalAdamW, build_optimizer, lr_factor
from .scaler import Scaler, build_scaler

__all__ = ["LocalAdamW", "Scaler", "StepMetrics", "build_optimizer", "build_scaler", "lr_factor", "train_step"]
