"""What things cost: measured here, in interleaved rounds, with medians."""

from __future__ import annotations

import os
import platform
from datetime import date
from typing import Any


def machine() -> str:
    """The machine, the versions and the day, as a line."""
    import torch

    from ..train.machine import versions

    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    made_with = ", ".join(f"{name} {number}" for name, number in versions().items())
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores ({platform.machine()}), {device}{load}; {made_with}; {date.today()}"


def timings(found: list[dict[str, Any]]) -> str:
    """Rows of what, seconds (the median) and most, as text: a line each."""
    lines = [f"{'':<56} {'median':>9} {'most':>9}"]
    for row in found:
        most = f"{row['most']:>7.3f} s" if row["most"] is not None else ""
        lines.append(f"{row['what']:<56} {row['seconds']:>7.3f} s {most:>9}".rstrip())
    return "\n".join(lines)
