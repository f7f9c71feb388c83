"""on_ranks: run a function on real ranks on this machine, as the benches, the tests and the course do."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .run.ranks.address import loopback_interface
from .run.ranks.rank_imports import AHEAD_OF_FUNCTIONS

SHARES_GPUS = (2, 30)
"""The first NCCL in which several ranks may have one GPU, if the variable below is set."""
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


def on_ranks(
    work: Callable[..., Any],
    ranks: int,
    *args: Any,
    method: str = "forkserver",
    backend: str = "gloo",
    timeout_s: float | None = None,
    share_gpus: bool = False,
) -> list[Any]:
    """Run `work(*args)` on so many ranks of a process group; return what each returned (plain data), by rank.

    method: forkserver (forks of one process with the slow imports done) or spawn (processes like any other). With nccl,
    each rank's current device is the GPU of its number. timeout_s: of a collective; default torch's. share_gpus: with
    nccl, several ranks may have one GPU, for tests of what they send and hold. Raises if any rank fails, ValueError for
    more ranks than GPUs, unless they share them, which NCCL can from 2.30 on.
    """
    gpus = torch.cuda.device_count() if backend == "nccl" else 0
    if backend == "nccl" and ranks > gpus:
        check_sharing(ranks, gpus, share_gpus=share_gpus)
    return in_processes(work_in_group, ranks, ranks, work, args, backend, timeout_s, gpus, method=method)


def check_sharing(ranks: int, gpus: int, *, share_gpus: bool) -> None:
    """Raise ValueError if so many ranks cannot join with nccl on so many GPUs."""
    if not share_gpus or not gpus:
        words = f"ranks: {ranks}, and nccl needs a GPU for each; this machine has {gpus}; use at most as many"
        raise ValueError(words)
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < SHARES_GPUS:
        words = f"share_gpus: NCCL {'.'.join(map(str, version))} takes one rank for each GPU; use torch with NCCL "
        raise ValueError(words + f"{'.'.join(map(str, SHARES_GPUS))} or later, such as 2.14 for CUDA 13")


def in_processes(
    work: Callable[..., Any], number: int, *args: Any, method: str = "forkserver", limit_s: float | None = None
) -> list[Any]:
    """Run `work(rank, folder, *args)` in processes that share a folder but no process group; return their results.

    limit_s: seconds after which they are killed, and TimeoutError is raised. Default: none.
    """
    multiprocessing.set_forkserver_preload(list(AHEAD_OF_FUNCTIONS))
    if method == "forkserver":
        start_fork_server()
    others = multiprocessing.active_children()
    with tempfile.TemporaryDirectory() as folder:
        values = folder, dict(os.environ), work, args
        try:
            started = mp.start_processes(_process, values, nprocs=number, join=False, start_method=method)
            deadline = None if limit_s is None else time.monotonic() + limit_s
            while not started.join(None if deadline is None else max(deadline - time.monotonic(), 0)):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"the processes have not ended within {limit_s:.0f} s")
        except BaseException:  # also Ctrl-C, which they ignore, and which may come while they are started
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(number)]


def start_fork_server() -> None:
    """Start the process that ranks are forked from, so that it and they ignore Ctrl-C, which a terminal sends to all.

    It ignores it by itself only once its imports are done; before, they would end in a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()  # only the main thread sets what becomes of a signal
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _process(rank: int, folder: str, environment: dict[str, str], work: Callable[..., Any], args: tuple) -> None:
    if not os.path.isdir(folder):  # who asked for this process was interrupted, and does not wait for it
        return
    os.environ.clear()  # a fork server has the environment of the time when it began
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # a collection would look through all modules, and copy the memory that this fork shares
    Path(folder, f"{rank}.json").write_text(json.dumps(work(rank, folder, *args)))


def work_in_group(
    rank: int,
    folder: str,
    ranks: int,
    work: Callable[..., Any],
    args: tuple,
    backend: str,
    timeout_s: float | None,
    gpus: int,
) -> Any:
    """Join the process group as one rank, call `work` in it, and return what that returns; leave the group.

    Args:
        rank: The number of this rank.
        folder: A folder of all ranks, in which they meet.
        ranks: The number of ranks.
        work: The function, with its arguments `args`.
        backend: gloo or nccl.
        timeout_s: Seconds that a collective may take. Default: torch's.
        gpus: The GPUs that ranks of nccl are dealt to in turn; 0 with gloo.
    """
    if loopback := loopback_interface():
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    store = dist.FileStore(f"{folder}/store", ranks)
    device = None
    if backend == "nccl":
        # Before the first collective: the barrier, and every tensor on "cuda", would be on GPU 0 in all ranks.
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        if ranks > gpus:
            os.environ[SHARING] = "1"
    else:
        # Or torch's optimizers, which look at the current stream, would make a context on a GPU that is there.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, device_id=device, timeout=timeout)
    dist.barrier()  # gloo fails in ranks that are still connecting to one that has destroyed its group already
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()
