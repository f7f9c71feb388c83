"""What this run's ranks reach here, measured on all of them at once: for the time that is predicted of a step."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from ..estimate import Machine
from ..params.cluster import read_cluster
from ..params.launch import LaunchParams

ROUNDS = 5
MIB = 2**20


def versions() -> dict[str, str]:
    """Of Python and the libraries that a step's bytes and figures depend on, by name."""
    return {name: version(name) for name in ("torch", "transformers", "open_clip_torch")} | {
        "Python": platform.python_version()
    }


def machine_here(launch: LaunchParams, device: torch.device, *, dtype: torch.dtype) -> Machine:
    """The figures of these ranks, those of the cluster's profile before measured ones. Every rank must call it; takes
    a tenth of a second.

    dtype: what matrices are multiplied in.
    """
    on_gpu = device.type == "cuda"
    product, copied, gathered = (4096, 256, 64) if on_gpu else (384, 8, 4)
    x = torch.ones(product, product, device=device, dtype=dtype)
    buffer = torch.ones(copied * MIB, dtype=torch.uint8, device=device)
    other, many = torch.empty_like(buffer), 100
    chain = nn.Sequential(*(nn.Linear(8, 8, device=device) for _ in range(many)))
    row = torch.ones(1, 8, device=device)
    seconds = {
        "product": lambda: x @ x,
        "copy": lambda: other.copy_(buffer),
        # A linear layer calls one operator in forward and, with what adds its gradients up, three in backward.
        "chain": lambda: chain(row).sum().backward(),
        "latency": _gathering(torch.ones(64, device=device)),
        "gather": _gathering(torch.ones(gathered * MIB // 4, device=device)),
    }
    took = {name: _median(act, device) for name, act in seconds.items()}
    ranks = dist.get_world_size()
    sent = gathered * MIB * (ranks - 1)
    figures = {
        "flops": 2 * product**3 / took["product"],
        "memory": 2 * buffer.nbytes / took["copy"],
        "bandwidth": max(1, sent) / max(took["gather"] - took["latency"], 1e-9),
        "latency": took["latency"],
        "overhead": 0.0 if on_gpu else took["chain"] / (4 * many),
    }
    profile = read_cluster(launch.cluster).machine if launch.cluster else {}
    name = torch.cuda.get_device_name(device) if on_gpu else "this machine's CPU"
    return Machine(**{"efficiency": 1.0, **figures, **profile}, name=name)  # type: ignore[arg-type]


def _gathering(part: torch.Tensor) -> Callable[[], object]:
    whole = part.new_empty(part.numel() * dist.get_world_size())
    return lambda: dist.all_gather_into_tensor(whole, part)


def _median(act: Callable[[], object], device: torch.device) -> float:
    """Seconds of an act that every rank does at the same time; the first, which warms up, is left out."""
    found = []
    for _ in range(ROUNDS + 1):
        _settled(device)
        dist.barrier()
        began = time.perf_counter()
        act()
        _settled(device)
        found.append(time.perf_counter() - began)
    return median(found[1:])


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
