"""`python -m tests.bench.gpu FOLDER PART=SECONDS ...`: the worker that does parts, one after the other."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from tests.bench.gpu.device import BACKEND, DEVICE, ON_GPU, free_memory
from tests.bench.gpu.parts import note
from tests.bench.gpu.rows import Rows


def main() -> None:
    """Do the parts. End early if one leaves the GPU unusable, as after an illegal access: another worker goes on."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, end_politely)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # It warns of in-place operations on a unit's output: nothing here does any.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    with one_rank():
        for word in sys.argv[2:]:
            name, _, limit = word.partition("=")
            note(folder, part=name, event="begins")
            print(f"== {name}, at most {limit} s", flush=True)
            start = time.monotonic()
            rows = Rows(folder / f"{name}.jsonl", seconds=float(limit))
            part: Callable[[Rows], None] = getattr(import_module(f"tests.bench.gpu.{name}"), name)
            part(rows)
            ended: dict[str, object] = {"part": name, "event": "ends", "seconds": round(time.monotonic() - start, 1)}
            if rows.failed:
                ended["failed"] = "rows say why; see log.txt"
            note(folder, **ended)
            torch.zeros(1, device=DEVICE).item()  # raises where nothing runs any more
            free_memory()


def end_politely(*_: object) -> None:
    """Let `finally` clauses run."""
    raise SystemExit(1)


@contextmanager
def one_rank() -> Iterator[None]:
    """Join a process group of this process alone."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = DEVICE if ON_GPU else None
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
