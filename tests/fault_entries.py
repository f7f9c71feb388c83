"""What the ranks of the fault tests run: the real training, with something that befalls one rank at some moment.

An entry is called <what>_<rank>_<moment>, such as `killed_1_step`.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch

from mmfsdp.checkpoint import saving
from mmfsdp.kit import train
from mmfsdp.kit.train import job, loop

RANK = int(os.environ.get("RANK", "0"))


def raises() -> None:
    raise RuntimeError("a bad day")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(600)


def memoryless() -> None:
    """More and more memory, until torch gets no more."""
    size = psutil.Process().memory_info().vms + (1 << 28)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    held = []
    while True:
        held.append(torch.ones(1 << 22))


def starved() -> None:
    """More and more memory in a cgroup of its own, until Linux kills this process."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory").is_dir()
    group = (root / "memory" if version_1 else root) / f"mmfsdp-{os.getpid()}"
    group.mkdir()
    # Only what is allocated from now on counts.
    (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(64 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(b"1" * (1 << 24))


def barred() -> None:
    """From now on, files cannot grow: the next checkpoint fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))


def __getattr__(entry: str) -> Callable[[Path], None]:
    what, _, rest = entry.partition("_")
    rank, _, moment = rest.partition("_")
    if what not in globals() or moment not in MOMENTS:
        raise AttributeError(entry)
    return partial(befall, what=globals()[what], rank=int(rank), moment=moment)


def befall(folder: Path, *, what: Callable[[], None], rank: int, moment: str) -> None:
    """Train, but in that rank, at that moment, `what`."""
    os.chdir(folder)

    def fault() -> None:
        (folder / "fault").touch()
        what()

    if RANK == rank:
        MOMENTS[moment](fault)
    train.run(folder)


def at_start(fault: Callable[[], None]) -> None:
    """When the model is to be built."""
    build = job.open_model
    job.open_model = lambda *args, **kwargs: (fault(), build(*args, **kwargs))[1]


def on_batches(change: Callable[[int, list], None]) -> None:
    """From now on, call `change(step, batches)` with what each step of a training takes."""
    take = loop.batches

    def batches(*args: Any, **kwargs: Any) -> Any:
        stream, steps = take(*args, **kwargs), count(1)

        def changed(micro_steps: int) -> list:
            taken = type(stream).take(stream, micro_steps)
            change(next(steps), taken)
            return taken

        stream.take = changed
        return stream

    loop.batches = batches


def at_step_4(fault: Callable[[], None]) -> None:
    """When the fourth step has asked for its data."""
    on_batches(lambda step, batches: fault() if step == 4 else None)


def in_a_save(fault: Callable[[], None]) -> None:
    """When the first checkpoint's tensors are written and it is not complete yet."""
    note = saving.file_checksums
    saving.file_checksums = lambda *args: (fault(), note(*args))[1]


MOMENTS = {"start": at_start, "step": at_step_4, "save": in_a_save}


def is_killed_once(folder: Path) -> None:
    if (folder / "fault").exists():
        train.run(folder)
    else:
        befall(folder, what=killed, rank=1, moment="step")
