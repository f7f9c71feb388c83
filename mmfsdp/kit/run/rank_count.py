"""The placement of a run's ranks: how many there are where `launch.ranks` is unset, on GPUs or the CPU, and why."""

from __future__ import annotations

import os
import subprocess
import sys

from ...params import Device, ParamError, RunParams
from .launchers.registry import launcher_named
from .local import available_cores

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there where a GPU may be: of NVIDIA's driver, of Windows' for Linux, and of AMD's."""
COUNT = "import torch; print(torch.cuda.device_count())"
COUNT_TIMEOUT_S = 120.0


def count_gpus() -> int:
    """Return the GPUs that torch sees on this machine, in this process's environment.

    Only torch knows: it depends on its build, on CUDA_VISIBLE_DEVICES, on MIG and on what a container shows. Its import
    takes seconds, so it is asked only where there is a driver, and in a process of its own if it is not imported yet.
    """
    if not has_driver():
        return 0
    if "torch" in sys.modules:
        import torch

        return torch.cuda.device_count()
    command = [sys.executable, "-c", COUNT]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_TIMEOUT_S).stdout.strip()
    except subprocess.TimeoutExpired:
        return 0
    return int(printed) if printed.isdecimal() else 0


def has_driver() -> bool:
    """Return whether this machine has the driver of a GPU."""
    return any(os.path.exists(file) for file in DRIVER_FILES)


def is_on_cpu(device: Device) -> bool:
    """Return True if a run with this `train.device` uses no GPU here, whatever torch may see."""
    return device is Device.CPU or not has_driver()


def with_ranks(params: RunParams) -> RunParams:
    """Return the parameters with a number of ranks: the one that is set, else one for each GPU, else 2.

    The GPUs are this machine's, or on Slurm the ones that the job asks for. Raises ParamError if the number does
    not fit the other parameters, or if there is no such profile of a cluster.
    """
    if params.launch.ranks is not None:
        return params
    return params.change(**{"launch.ranks": launcher_named(params.launch.executor).ranks(params)})


def check_gpus(params: RunParams) -> None:
    """Raise ParamError if a run on this machine wants a GPU for each rank, and there are too few."""
    if params.train.device is Device.CUDA:
        gpus, ranks = count_gpus(), params.launch.world_size
        if gpus < ranks:
            raise too_few_gpus(params, gpus=gpus, ranks=ranks)


def too_few_gpus(params: RunParams, *, gpus: int, ranks: int) -> ParamError:
    """Return the error of a node that has fewer GPUs than ranks, though GPUs are wanted."""
    words = f"{params.train.device} needs a GPU per rank: this node has {ranks} ranks, and torch sees "
    return ParamError("train.device", f"{words}{count_of(gpus, 'GPU')}; set launch.ranks lower, or train.device to cpu")


def trains_on(params: RunParams) -> str:
    """Return a line for whoever launches a run: where it will train, and why. Raises ParamError as `with_ranks`."""
    settled = with_ranks(params)
    gpus = launcher_named(settled.launch.executor).gpus(settled)
    on_gpus = settled.train.device is not Device.CPU and gpus >= settled.launch.world_size
    return place_of(settled, gpus=gpus, on_gpus=on_gpus, is_default=params.launch.ranks is None)


def crowding(params: RunParams) -> str:
    """Return a warning where far more ranks are to run on this machine's cores than there are; "" where not.

    Two ranks on one core are usual where people learn; where many share one, most of the time goes into waiting.
    """
    cores = available_cores()
    ranks = params.launch.ranks or 0
    on_gpus = params.train.device is not Device.CPU and has_driver()
    if not launcher_named(params.launch.executor).here or on_gpus or ranks <= max(4, 2 * cores):
        return ""
    return f"{ranks} ranks would share {count_of(cores, 'core')} here and mostly wait; plan them, and launch fewer"


def place_of(params: RunParams, *, gpus: int, on_gpus: bool, is_default: bool = False) -> str:
    """Return a line that says where a run trains, and why.

    gpus: of this machine or job. is_default: the number of ranks was unset.
    """
    launch = params.launch
    ranks = launch.world_size
    place = "the CPU"
    if on_gpus:
        place = count_of(ranks, "GPU")
        if launcher_named(launch.executor).here and gpus > ranks:
            place = f"{ranks} of {gpus} GPUs"
    place += f" in {count_of(ranks, 'rank')}"
    if launch.nodes > 1:
        place += f" on {launch.nodes} nodes"
    if is_default:
        place += ", as launch.ranks is unset"
    return f"trains on {place}: {_why(params, gpus=gpus, on_gpus=on_gpus, is_default=is_default)}"


def _why(params: RunParams, *, gpus: int, on_gpus: bool, is_default: bool) -> str:
    """Return why a run trains where it does."""
    launch, device = params.launch, params.train.device
    if device is Device.CPU:
        return "train.device is cpu"
    launcher = launcher_named(launch.executor)
    if not on_gpus:
        return launcher.why_no_gpu(gpus)
    if not launcher.here:
        return f"train.device is {device}"
    return "a rank for each GPU" if is_default else f"launch.ranks is {launch.ranks}"


def why_no_gpu_here(gpus: int) -> str:
    """Return why ranks on this machine are on the CPU though GPUs are allowed. gpus: as many as torch sees."""
    if gpus:
        words = f"torch sees {count_of(gpus, 'GPU')} here, which is too few"
        return f"{words}; set launch.ranks to {gpus} to train on GPUs"
    if has_driver() and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    if has_driver():
        return "torch sees no GPU here, though there is a driver; install a torch that is built for it"
    return "torch sees no GPU here"


def count_of(number: int, noun: str) -> str:
    """Return such as `1 GPU` or `2 GPUs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
