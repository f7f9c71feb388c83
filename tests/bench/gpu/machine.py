"""Tell what the machine is, and the rates that its GPU reaches."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.bench.gpu.device import DEVICE, ON_GPU, copy_rate, matrix_rate
from tests.bench.gpu.rows import Rows

LIBRARIES = ("torch", "triton", "transformers", "open_clip_torch")


def machine(rows: Rows) -> None:
    """Write one row: names, versions, rates."""
    row = {"device": "CPU", "count": torch.cuda.device_count(), "cuda": str(torch.version.cuda)}
    row |= {"cores": os.cpu_count(), "python": platform.python_version()}
    if ON_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        row |= {"device": properties.name, "memory GB": properties.total_memory / 1e9}
        row["capability"] = f"{properties.major}.{properties.minor}"
    for name in LIBRARIES:
        try:
            row[name] = version(name)
        except PackageNotFoundError:
            row[name] = "missing"
    row |= {"matrix TFLOP/s": matrix_rate() / 1e12, "copy GB/s": copy_rate() / 1e9}
    rows.write(row)
