"""`python -m tests.bench.launch`: how long launch() takes, until the first line is seen, and how old lines are then."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmfsdp.params import Device, Executor, LaunchParams, RunParams, TrainParams
from mmfsdp.run.launch import launch
from mmfsdp.run.watch import LogReader

LINES = 20


def bench_launch(
    *, slurm: bool = False, nodes: int = 1, ranks: int = 2, rounds: int = 5, cluster: str | None = None
) -> dict[str, Any]:
    """Seconds, in interleaved rounds: returns (of launch), first_line (from the call to the first line seen), line_age
    (from print to seen). On Slurm also bare: to the first line of a job that runs echo by sbatch and srun.

    The folder of the runs is made in the current one, which all nodes must share.
    """
    executor = Executor.SLURM if slurm else Executor.LOCAL
    found: dict[str, list[float]] = {"returns": [], "first_line": [], "line_age": [], **({"bare": []} if slurm else {})}
    with TemporaryDirectory(dir=".") as name:
        folder = Path(name).absolute()
        for number in range(rounds):
            if slurm:
                found["bare"].append(_bare(folder / f"bare{number}", nodes, ranks // nodes))
            slurm_fields: dict[str, Any] = {"nodes": nodes, "cluster": cluster, "gpus_per_node": 0} if slurm else {}
            settings = LaunchParams(
                folder=name, name=f"run{number}", ranks=ranks, executor=executor, timeout_min=5, **slurm_fields
            )
            params = RunParams(launch=settings, train=TrainParams(device=Device.CPU, steps=LINES))
            for kind, seconds in _round(params).items():
                found[kind] += seconds
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return {"executor": executor.value, "nodes": nodes, "ranks": ranks, "rounds": rounds, **medians}


def _round(params: RunParams) -> dict[str, list[float]]:
    began = time.time()
    run = launch(params, entry=f"{__name__}:talk")
    returns, ages, tail = time.time() - began, [], LogReader(run.path)
    first = _until(lambda: tail.poll(), run.state)
    seen = time.time()
    while not (state := run.state()).done:
        for line in [*first, *tail.poll()]:
            if line.text.startswith("at "):
                ages.append(time.time() - float(line.text.split()[1]))
        first = []
        time.sleep(0.02)
    if not state.ok:
        raise RuntimeError(f"{state}\n{run.logs(0)}")
    return {"returns": [returns], "first_line": [seen - began], "line_age": ages}


def talk(folder: Path) -> None:
    """What the ranks run: lines that say when they were printed."""
    for _ in range(LINES):
        print(f"at {time.time()}")
        time.sleep(0.1)


def _bare(log: Path, nodes: int, tasks: int) -> float:
    """Seconds from sbatch to the first line of a job that only prints."""
    task = ["srun", "--unbuffered", f"--output={log}", "echo", "here"]
    text = (
        f"#!/bin/bash\n#SBATCH --nodes={nodes} --ntasks-per-node={tasks} --output=/dev/null\n" + " ".join(task) + "\n"
    )
    began = time.time()
    subprocess.run(["sbatch"], input=text, text=True, check=True, capture_output=True, env=os.environ)
    _until(lambda: log.exists() and log.stat().st_size, str)
    return time.time() - began


def _until(condition: Callable[[], Any], state: Callable[[], Any]) -> Any:
    until = time.monotonic() + 120
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"no line within 120 s: {state()}")
        time.sleep(0.01)
    return value


def table(found: dict[str, Any]) -> str:
    """The result as text."""
    words = {
        "returns": "launch() returns after",
        "first_line": "the first line is seen after",
        "bare": "   of which a bare sbatch and srun take",
        "line_age": "a line is seen, after it was printed, within",
    }
    head = f"{found['executor']}, {found['nodes']} nodes, {found['ranks']} ranks; medians of {found['rounds']} rounds"
    return "\n".join([head, *(f"{text:<48}{found[kind]:>8.2f} s" for kind, text in words.items() if kind in found)])


if __name__ == "__main__":
    print(table(bench_launch()))
