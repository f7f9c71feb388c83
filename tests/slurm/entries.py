"""What the ranks of the Slurm tests run in place of a training; processes that import no torch."""

import os
import resource
import signal
import time
from pathlib import Path

from mmfsdp.run.folder import MetricsWriter, heartbeat_path
from mmfsdp.run.hang import Heartbeat
from mmfsdp.run.preempt import Preempted, preemption_requested

RANK = int(os.environ.get("RANK", "0"))


def places(folder: Path) -> None:
    """Say where this rank is."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS CUDA_VISIBLE_DEVICES PLACE"
    print(*(f"{name}={os.environ.get(name)}" for name in names.split()), f"node={os.environ['SLURMD_NODENAME']}")
    print(f"port={os.environ['MASTER_PORT']}")


def stream(folder: Path) -> None:
    """A line and a row of metrics every tenth of a second until stopped; deaf to TERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    metrics, beat = MetricsWriter(folder, RANK), Heartbeat(folder, RANK)
    for step in range(1, 6000):
        beat(f"step {step} compute")
        print(f"at {time.time()}")
        metrics.write({"step": step, "time": time.time()})
        time.sleep(0.1)


def hang(folder: Path) -> None:
    """Rank 3 hangs in its third step, and the others wait for it."""

    def hang_here() -> None:
        time.sleep(600)

    beat = Heartbeat(folder, RANK)
    while RANK != 3 and not heartbeat_path(folder, 3).exists():  # as they meet in a training, however late one starts
        time.sleep(0.05)
    for step in range(1, 3):
        beat(f"step {step} compute")
        time.sleep(0.1)
    beat(f"step {3 if RANK == 3 else 4} compute")
    hang_here()


def fill(folder: Path) -> None:
    """Rank 1 may write no more."""
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open(folder / "big", "wb", buffering=0) as file:
            while True:
                if file.write(bytes(4096)) < 4096:
                    file.write(b"1")
    time.sleep(60)


def killed(folder: Path) -> None:
    """Rank 2 is killed, the others wait."""
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def raises(folder: Path) -> None:
    """Rank 2 raises, rank 0 holds out."""
    if RANK == 2:
        raise RuntimeError("the cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def polite(folder: Path) -> None:
    """Steps until it is preempted, as in training."""
    for step in range(1, 6000):
        if preemption_requested():
            raise Preempted(step)
        print(f"life {os.environ.get('SLURM_RESTART_COUNT', '0')} step {step}")
        time.sleep(0.1)


def trains(folder: Path) -> None:
    """The real training, with a pause in each step and save until its last life, whose number is by launch.name."""
    from mmfsdp import train
    from mmfsdp.checkpoint import saving
    from mmfsdp.train import loop

    last, pause = (1, 2.0) if folder.name == "limited" else (5, 0.3)
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= last:
        return train.run(folder)
    states, reset = saving.random_states, loop.Collectives.reset

    def slow_states():
        time.sleep(pause)
        return states()

    def slow_reset(self) -> None:
        time.sleep(pause)
        reset(self)

    saving.random_states, loop.Collectives.reset = slow_states, slow_reset
    train.run(folder)
