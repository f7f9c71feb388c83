"""Make the runs of mmfsdp/kit/run/replay/recordings: `python -m tests.make_recordings preemption hang out_of_memory
--to FOLDER`.

Each is a real run with a real fault. Then `mmfsdp record FOLDER/hang hang.jsonl --about "..."` makes the recording.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

from mmfsdp import Run, launch
from mmfsdp.params import load
from tests.slurm.cluster import Cluster
from tests.waiting import until

FAULTS = '''
import torch
import torch.distributed as dist


class CollectScores:
    """After step 24 rank 0 waits for a score of rank 1, which has no picture to score: it sends none, and goes on."""

    def on_step_end(self, row):
        if row["step"] == 24 and dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=1)

'''
MEMORY_LIMIT_GIB = 6
"""Address space of each process of the run out of memory."""


def preemption(folder: Path) -> Run:
    """Two nodes of a Slurm; after step 24 the job gets the signal of the time limit, is requeued, and ends well."""
    cluster = Cluster()
    try:
        cluster.start()
        os.environ.update(cluster.environment)
        slurm = {"launch.executor": "slurm", "launch.nodes": 2, "launch.ranks": 4, "launch.gpus_per_node": 0}
        run = start(folder, "preemption", **slurm, **{"train.steps": 60, "train.save_every": 20})
        until(lambda: run.state().step >= 24, seconds=600)
        cluster.ask("scancel", "--signal=USR2", run.job or "")
        until(lambda: any(event["kind"] == "preempted" for event in run.events()), seconds=600)
        time.sleep(20)  # of the two minutes that Slurm lets a requeued job wait
        until(lambda: cluster.release() or any(event["kind"] == "requeued" for event in run.events()), seconds=600)
        run.wait(600)
    finally:
        cluster.stop()
    return run


def hang(folder: Path) -> Run:
    """Two ranks; after step 24 rank 0 waits for what rank 1 does not send."""
    faults = {"train.callbacks": ["faults:CollectScores"], "launch.silence_s": 30}
    run = start(folder, "hang", **{"launch.ranks": 2, "train.steps": 60} | faults)
    run.wait(600)
    return run


def out_of_memory(folder: Path) -> Run:
    """Two ranks with a batch of 4,096 samples each, which does not fit into the memory that they may have."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_GIB << 30, resource.RLIM_INFINITY))
    run = start(folder, "out_of_memory", **{"launch.ranks": 2, "train.steps": 60, "train.batch_size": 4096})
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.wait(600)
    return run


def start(folder: Path, name: str, **changes) -> Run:
    """Launch the preset tiny with a fault, in `folder`."""
    changes |= {"launch.name": name, "launch.folder": str(folder), "train.device": "cpu", "train.eval_every": None}
    return launch(load("tiny").change(**changes))


def main() -> None:
    """Make the runs that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    makers = {make.__name__: make for make in (preemption, hang, out_of_memory)}
    parser.add_argument("runs", nargs="+", choices=makers)
    parser.add_argument("--to", type=Path, required=True)
    values = parser.parse_args()
    values.to.mkdir(parents=True, exist_ok=True)
    os.chdir(values.to)
    Path("faults.py").write_text(FAULTS)
    sys.path.insert(0, str(values.to))
    for name in values.runs:
        print(makers[name](values.to.absolute()), flush=True)


if __name__ == "__main__":
    main()
