"""`python -m tests.bench.start [ROUNDS [CHECKOUT ...]]`: what a start of the demo costs each of its processes.

Starts tiny on two ranks ROUNDS times (5) from each checkout in turn (default: this one), and looks at its first
step. Prints medians of CPU seconds (user and system) of the launching process, of the supervisor, and of a rank up to
the end of each part of its start; and the seconds from the launch to the end of the first step, which depend on what
else the machine does. Pass two checkouts to compare them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from mmfsdp import Run
from mmfsdp.run.folder import read_heartbeat, read_json
from mmfsdp.run.stages import progress_of

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
POLL_S = 0.03
PARTS = {"importing": "imports", "starting": "join", "joining": "join", "wrapping": "wrap", "taking": "first data"}
"""First word of what a rank reports -> the part of its start, where that is not the word itself."""


def start_once(checkout: Path, folder: Path) -> dict[str, float]:
    """Return seconds by name for one start in an empty folder."""
    changes = {"train.steps": 4, "train.warmup_steps": 1, "train.eval_every": 100, "launch.folder": str(folder)}
    began = time.monotonic()
    code = f"from mmfsdp import launch; from mmfsdp.params import load; launch(load('tiny').change(**{changes}))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}
    )
    run = folder / "tiny"
    seconds: dict[str, float] = {}
    ranks = [RankStart(run, rank) for rank in range(RANKS)]
    while not all(rank.stepped for rank in ranks):
        if launcher.poll() not in (None, 0):
            raise SystemExit(f"the run has failed; see {run}")
        if used := cpu_s(launcher.pid):
            seconds["launcher: CPU until it ends"] = used
        for rank in ranks:
            rank.look()
        time.sleep(POLL_S)
    seconds["wait from the launcher's start to the end of the first step"] = time.monotonic() - began
    record = read_json(run / "run.json") or {}
    seconds["supervisor: CPU until then"] = cpu_s(record["pid"])
    for rank in ranks:
        for part, cost in rank.parts.items():
            name = f"rank: {part}"
            seconds[name] = seconds.get(name, 0.0) + cost / RANKS
        seconds["rank: sum"] = seconds.get("rank: sum", 0.0) + sum(rank.parts.values()) / RANKS
    Run.open(run).wait()
    launcher.wait()
    return seconds


class RankStart:
    """Follows one rank to the end of its first step, and adds up the CPU seconds of each part."""

    def __init__(self, run: Path, rank: int):
        self.run, self.rank = run, rank
        self.parts: dict[str, float] = {}
        self.stepped = False
        self._part, self._counted = "python and submitit", 0.0

    def look(self) -> None:
        """Add the CPU seconds since the last look to the part that the rank was in then."""
        status, beat = read_json(self.run / "logs" / f"rank{self.rank}.json"), read_heartbeat(self.run, self.rank)
        if self.stepped or not status:
            return
        used = cpu_s(status["pid"])
        self.parts[self._part] = self.parts.get(self._part, 0.0) + used - self._counted
        self._counted = used
        if beat is None:
            return
        word = beat[0].split()[0].rstrip(":")
        self._part = "first step" if word == "step" else PARTS.get(word, word)
        self.stepped = progress_of(beat[0])[1] > 1


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of a process so far; 0 once it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def main(rounds: int = 5, checkouts: Sequence[Path] = (ROOT,)) -> None:
    """Measure, and print a table with a column for each checkout."""
    measured: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as folder:
                measured[checkout].append(start_once(checkout, Path(folder)))
    names: dict[str, None] = {}
    for runs in measured.values():
        for run in runs:
            names.update(dict.fromkeys(run))
    print(f"medians of {rounds}, seconds:", *checkouts)
    for name in names:
        figures = [f"{median(run.get(name, 0.0) for run in runs):8.2f}" for runs in measured.values()]
        print(f"{name:52}", *figures)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, [Path(arg).resolve() for arg in sys.argv[2:]] or [ROOT])
