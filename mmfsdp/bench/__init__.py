"""What things cost: measured here, in interleaved rounds, with medians."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version


def machine() -> str:
    """The machine, the versions and the day, as a line."""
    import torch

    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "open_clip_torch"))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {device}{load}; {versions}, Python "
        f"{platform.python_version()}; {date.today()}"
    )
