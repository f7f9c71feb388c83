"""join_group: join the process group of a run, at the address that rank.py has set."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..local import LOOPBACK, RUN_VARIABLE

if TYPE_CHECKING:
    import torch


def join_group(backend: str, device: torch.device | None = None, *, timeout_s: float | None = None) -> None:
    """Join the process group that torch.distributed's environment variables name; wait for all ranks.

    device: nccl's, which then never guesses a rank's GPU, and connects immediately, so that a mistake shows here.
    timeout_s: of the meeting and of each collective; default torch's.
    """
    import torch.distributed as dist

    options: dict[str, Any] = {"device_id": device}
    if timeout_s is not None:
        options["timeout"] = timedelta(seconds=timeout_s)
    if RUN_VARIABLE in os.environ and os.environ["MASTER_ADDR"] == LOOPBACK:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # torch's own store would listen on every interface.
        port = int(os.environ["MASTER_PORT"])
        listener = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None
        limit = {} if timeout_s is None else {"timeout": options["timeout"]}
        store = dist.TCPStore(LOOPBACK, port, ranks, is_master=rank == 0, master_listen_fd=listener, **limit)
        options |= {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **options)
