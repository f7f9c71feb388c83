"""What the ranks of the fault tests run: the real training, with something that befalls rank 1 at its fourth step."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mmfsdp import train
from mmfsdp.train import loop

RANK = int(os.environ.get("RANK", "0"))


def at_step_4(folder: Path, befalls: Callable[[], None]) -> None:
    """Train; in rank 1, `befalls` when the fourth step asks for its data."""
    take = loop.batches

    def batches(*args, **kwargs):
        stream = take(*args, **kwargs)

        class Broken:
            lacks, news, count = stream.lacks, stream.news, 0

            def take(self, micro_steps):
                self.count += 1
                if RANK == 1 and self.count == 4:
                    (folder / "fault").touch()
                    befalls()
                return stream.take(micro_steps)

        return Broken()

    loop.batches = batches
    train.run(folder)


def raises(folder: Path) -> None:
    def bad_day() -> None:
        raise RuntimeError("a bad day")

    at_step_4(folder, bad_day)


def is_killed(folder: Path) -> None:
    at_step_4(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def is_stopped(folder: Path) -> None:
    at_step_4(folder, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def hangs(folder: Path) -> None:
    def hang_at() -> None:
        time.sleep(600)

    at_step_4(folder, hang_at)


def has_no_memory(folder: Path) -> None:
    def eat() -> None:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        torch.zeros(1 << 34)

    at_step_4(folder, eat)


def may_not_write(folder: Path) -> None:
    """From step 4 on, rank 1's files cannot grow: the checkpoint after the last step fails."""
    at_step_4(folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)))


def fills_the_disk(folder: Path) -> None:
    """Rank 1 leaves no byte on the disk."""

    def fill() -> None:
        with open(folder / "filler", "wb", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    at_step_4(folder, fill)


def is_killed_once(folder: Path) -> None:
    if (folder / "fault").exists():
        train.run(folder)
    else:
        is_killed(folder)
