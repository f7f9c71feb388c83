"""`python -m tests.bench.recorder`: what torch's flight recorder and its server take of a training step.

Two groups of two ranks train the same small model, one with the recorder and one without. They take a step in turn, so
that what else the machine does slows both alike. Prints the median of each, and the median of the differences of
neighboring steps as a share of a step. Takes a minute on two quiet cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS, WARMUP = 400, 20
RANKS = 2


def rank_loop(folder: str) -> None:
    """Train, one step for each line on stdin; the first rank prints the seconds of each."""
    import torch
    import torch.distributed as dist

    from mmfsdp import FSDPParams, train_step, wrap_fsdp
    from mmfsdp.kit.bench.bench_models import random_model
    from mmfsdp.kit.bench.bench_step import batch_for
    from mmfsdp.kit.hangs.rank_server import serve
    from mmfsdp.params import load

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if folder:
        assert serve(Path(folder), rank)
    dist.init_process_group("gloo")
    params = load("tiny")
    model = random_model(params.model)
    batch = batch_for(params, model, rank)
    model = wrap_fsdp(model, FSDPParams(), example=batch.inputs())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in sys.stdin:
        start = time.perf_counter()
        float(train_step(model, [batch], optimizer, max_grad_norm=1.0).loss)
        dist.barrier()
        print("seconds", time.perf_counter() - start, flush=True)
    os._exit(0)


class Group:
    """Ranks that take a step when they are told to."""

    def __init__(self, port: int, sockets: str):
        """sockets: the folder of the servers of ranks that record; empty: they do not."""
        self.processes = []
        for rank in range(RANKS):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "OMP_NUM_THREADS": 1}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            variables |= {"TORCH_FR_BUFFER_SIZE": 2000 if sockets else 0}
            command = [sys.executable, "-m", "tests.bench.recorder", f"sockets={sockets}"]
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.processes.append(subprocess.Popen(command, env=environment, **pipes))

    def step(self) -> float:
        """Return the seconds of a step."""
        for process in self.processes:
            process.stdin.write("step\n")
            process.stdin.flush()
        return max(map(self._seconds, self.processes))

    @staticmethod
    def _seconds(process: subprocess.Popen[str]) -> float:
        for line in process.stdout:
            if line.startswith("seconds "):  # gloo prints lines of its own
                return float(line.split()[1])
        raise RuntimeError("a rank has ended")

    def end(self) -> None:
        """Let the ranks end."""
        for process in self.processes:
            process.stdin.close()
            process.wait()


def main(rounds: int = ROUNDS) -> None:
    """Measure, and print the medians."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        groups = {"without": Group(21_731, ""), "with": Group(21_733, sockets)}
        for turn in range(WARMUP + rounds):
            names = ("without", "with") if turn % 2 else ("with", "without")
            for name in names:
                seconds[name].append(groups[name].step())
        for group in groups.values():
            group.end()
    without, recorded = (values[WARMUP:] for values in seconds.values())
    difference = statistics.median(b - a for a, b in zip(without, recorded, strict=True))
    for name, values in (("without", without), ("with", recorded)):
        print(f"{name} the recorder: {statistics.median(values) * 1e3:.2f} ms a step (median of {rounds})")
    print(f"difference of steps in turn: {difference * 1e6:+.0f} us, {difference / statistics.median(without):+.2%}")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("sockets="):
        rank_loop(sys.argv[1].removeprefix("sockets="))
    else:
        main(*map(int, sys.argv[1:]))
