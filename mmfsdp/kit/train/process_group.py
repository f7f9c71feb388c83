"""The process group of a rank. Imports torch and no models, which a loop of one's own may do without."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ...params import Device, RunParams
from ..hangs.rank_server import serve_here
from ..run.launchers.registry import launcher_named
from ..run.preempt import Preempted
from ..run.rank_count import place_of, too_few_gpus
from ..run.ranks.address import join_group
from ..run.ranks.fork import forked_from
from ..run.slurm.site import HIDDEN_GPUS


@contextmanager
def process_group(params: RunParams) -> Iterator[torch.device]:
    """Join the process group, nccl on CUDA and gloo on the CPU; gives this rank's device."""
    device = pick_device(params)
    place = place_of(params, gpus=torch.cuda.device_count(), on_gpus=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # Or torch's optimizers, which look at the current stream, would make a context on a GPU that is there.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    serve_here()
    backend = "nccl" if device.type == "cuda" else "gloo"
    join_group(backend, device if device.type == "cuda" else None)
    if dist.get_rank() == 0:
        print(place)
        if device.type == "cuda" and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
            print(f"rank 0 sees {torch.cuda.device_count()} of the GPUs of its node: {HIDDEN_GPUS}")
    where = ", ".join(filter(None, (f"{device}, process {os.getpid()} on {socket.gethostname()}", forked_from())))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {where}")
    try:
        yield device
        dist.barrier()
    except Preempted:
        dist.destroy_process_group()
        raise
    # Not after another exception: the other ranks would report a lost connection before this rank reports the cause.
    dist.destroy_process_group()


def pick_device(params: RunParams) -> torch.device:
    """Return the device of this rank.

    Raises ParamError if this rank sees too few GPUs though CUDA is wanted, or though Slurm has allocated GPUs.
    """
    wanted, ranks = params.train.device, int(os.environ["LOCAL_WORLD_SIZE"])
    if wanted is Device.CPU:
        return torch.device("cpu")
    gpus, allocated = torch.cuda.device_count(), launcher_named(params.launch.executor).allocated_gpus()
    # With --gpus-per-task or --gpu-bind a rank sees its own GPUs only, or the GPUs next to its socket, numbered from 0.
    if gpus >= ranks or (gpus and allocated >= ranks):
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    if wanted is Device.CUDA or allocated:
        raise too_few_gpus(params, gpus=gpus, ranks=ranks)
    return torch.device("cpu")
