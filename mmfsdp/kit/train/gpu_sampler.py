"""GPU use, power and temperature in the rows of a run: a thread of each node's first rank asks NVML every few seconds.

It writes what it hears into a file, from which the other ranks of the node add their own GPU's figures to their rows.
A rank whose GPU that thread cannot see, such as where Slurm hides other tasks' GPUs, asks by itself. GPUs are told
apart by their UUID, never by an index, which CUDA_VISIBLE_DEVICES and PCI order change; a slice of a GPU (MIG) has no
figures of its own, so its rank has none. Nothing here ends or delays a run: without nvidia-ml-py, without a driver, and
after any error, the figures are missing.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...core.collectives import gather_json
from ..run.files.folder import make_inner_folder, read_json, write_json
from .callbacks import Callback, Training

SAMPLE_S = 5.0
"""Seconds between two samples."""
FRESH_S = 6 * SAMPLE_S
"""Age in seconds from which a sample is left out: whoever wrote it has ended, or waits."""
FIGURES = ("gpu_use", "power_w", "temperature_c")

Sample = dict[str, dict[str, float]]
"""Figures by the UUID of a GPU."""


class Sampler:
    """A thread that asks for a sample every few seconds, until it is closed or asking fails."""

    def __init__(self, ask: Callable[[], Sample], path: Path | None = None, *, every_s: float = SAMPLE_S) -> None:
        """path: of a file that gets each sample, for the other ranks of this node."""
        self.sample: Sample = {}
        """The newest."""
        self.asked_at = -math.inf
        """The time of the newest question (time.monotonic)."""
        self._ask, self._path, self._every_s = ask, path, every_s
        self._closing = threading.Event()
        self.thread = threading.Thread(target=self._run, name="GPU sampler", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self.thread.start()

    def close(self) -> None:
        """End. A driver that does not answer is not waited for."""
        self._closing.set()
        if self.thread.is_alive():
            self.thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self.sample = self._ask()
                self.asked_at = time.monotonic()
                if self._path is not None:
                    with suppress(OSError):  # a full disk, a share that is away: the next one is written
                        make_inner_folder(self._path.parent)
                        write_json(self._path, {"time": time.time(), "gpus": self.sample})
                self._closing.wait(self._every_s)
        except Exception as error:  # the run goes on without
            print(f"GPU use is no longer sampled: {type(error).__name__}: {error}"[:300])


class GpuFigures(Callback):
    """Adds `gpu_use` (0 to 1), `power_w` and `temperature_c` of this rank's GPU to its rows, while they are fresh."""

    def __init__(self, uuid: str | None, *, sampler: Sampler | None = None, path: Path | None = None) -> None:
        """sampler: of this rank, where it has one; else path is that of the file that another rank's writes."""
        self._uuid, self.sampler, self._path = uuid, sampler, path
        self._figures: dict[str, float] = {}
        self._next_look = 0.0  # time.monotonic

    def on_train_begin(self) -> None:
        """Begin to sample."""
        if self.sampler is not None:
            self.sampler.start()

    def after_step(self, step: int) -> dict[str, Any]:
        """Return the newest figures."""
        now = time.monotonic()
        if self.sampler is not None:
            is_fresh = now - self.sampler.asked_at < FRESH_S
            return dict(self.sampler.sample.get(self._uuid or "", {})) if is_fresh else {}
        if now >= self._next_look and self._path and self._uuid:
            self._next_look = now + SAMPLE_S
            self._figures = read_figures(self._path, self._uuid)
        return dict(self._figures)

    def close(self) -> None:
        """End the sampler of this rank."""
        if self.sampler is not None:
            self.sampler.close()


def read_figures(path: Path, uuid: str) -> dict[str, float]:
    """Return the figures of a GPU from the file that a sampler of this node writes; {} if there are no fresh ones."""
    try:
        content = read_json(path) or {}
        if abs(time.time() - content["time"]) > FRESH_S:
            return {}
        figures = content["gpus"].get(uuid, {})
        return {key: float(figures[key]) for key in FIGURES if key in figures}
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return {}


def training_gpus(training: Training) -> GpuFigures | None:
    """Return the callback of a training on NVIDIA GPUs, else None. Every rank must call it."""
    if training.device.type != "cuda":
        return None
    own, host = uuid_of(training.device), socket.gethostname()
    ranks = gather_json([host, own])
    of_node = [other for other, (name, _) in enumerate(ranks) if name == host]
    first, is_first = of_node[0], dist.get_rank() == of_node[0]
    ask, seen = open_nvml(ranks[other][1] for other in of_node) if is_first else (None, [])
    seen_by_first = gather_json(seen)[first]
    path = training.setup.folder / "gpus" / f"rank{first}.json"
    if not is_first and own in seen_by_first:
        return GpuFigures(own, path=path)
    if not is_first and own is not None:
        ask, _ = open_nvml([own])
    if ask is None:
        return None
    return GpuFigures(own, sampler=Sampler(ask, path if len(seen) > 1 else None))


def uuid_of(device: torch.device) -> str | None:
    """Return the UUID of a GPU as NVML writes it; None for a slice of one (MIG), and for AMD's."""
    try:
        if torch.version.hip or "MIG" in torch.cuda.get_device_name(device):
            return None
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except Exception:  # the figures are missing then
        return None


def open_nvml(uuids: Iterable[str | None]) -> tuple[Callable[[], Sample] | None, list[str]]:
    """Return what asks NVML for a sample of some GPUs, and the UUIDs of those that it sees; (None, []) if of none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        print("GPU use, power and temperature are not known: pip install 'mmfsdp[gpu]' (nvidia-ml-py) tells them")
        return None, []
    except Exception as error:  # no driver, or not one of this version
        print(f"GPU use, power and temperature are not known: {type(error).__name__}: {error}"[:300])
        return None, []
    handles = {}
    for uuid in uuids:
        try:
            if uuid is not None:
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # hidden from this process
            continue

    def ask() -> Sample:
        return {uuid: figures_of(nvml, handle) for uuid, handle in handles.items()}

    return (ask if handles else None), list(handles)


def figures_of(nvml: Any, handle: Any) -> dict[str, float]:
    """Return the figures of a GPU, without those that it does not tell.

    NVML has percents, milliwatts and degrees Celsius. Its use is the share of time in which any kernel ran.
    """
    questions: Mapping[str, Callable[[], float]] = {
        "gpu_use": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    figures = {}
    for key, question in questions.items():
        with suppress(nvml.NVMLError):
            figures[key] = float(question())
    return figures
