"""`python -m tests.bench.start [ROUNDS [RANKS [CHECKOUT ...]]]`: what a start of the demo costs each of its processes.

Starts tiny on RANKS ranks (2) ROUNDS times (5) in each way in turn, and looks at its first step: by a command, as from
a cockpit that has planned it, and as from a cockpit with a warm process. Prints medians of CPU seconds (user and
system) of the launching process, of the supervisor, and of a rank up to the end of each part of its start; of the
memory of all ranks (PSS: shared pages count once); and of the seconds from the launch to the end of the first step,
which depend on what else the machine does. Pass checkouts to compare the command in each of them.
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
from mmfsdp.kit.run.files.folder import read_heartbeat, read_json
from mmfsdp.kit.run.files.stages import progress_of

ROOT = Path(__file__).resolve().parents[2]
COMMAND, COCKPIT, WARM = "command", "cockpit", "cockpit, warm"
CODE = """
import os, sys, time
from mmfsdp import launch
from mmfsdp.params import load
params = load("tiny").change(**{changes})
if {way!r} != "command":
    from mmfsdp.kit.train.prepare import prepare
    params = prepare(params)
if {way!r} == "cockpit, warm":
    from mmfsdp.kit.run.ranks.warm import socket_path, start_warm
    warm = start_warm()
    while not socket_path(dict(os.environ)).exists():
        time.sleep(0.05)
print(time.time(), flush=True)
launch(params)
sys.stdin.read()
"""
"""What the launching process runs. It ends when its stdin does: a warm process ends with it."""
POLL_S = 0.03
PARTS = {"importing": "imports", "starting": "join", "joining": "join", "wrapping": "wrap", "taking": "first data"}
"""First word of what a rank reports -> the part of its start, where that is not the word itself."""


def start_once(checkout: Path, folder: Path, *, number: int = 2, way: str = COMMAND) -> dict[str, float]:
    """Return seconds and MiB by name for one start in an empty folder."""
    changes = {
        "train.steps": 4,
        "train.warmup_steps": 1,
        "train.eval_every": 100,
        "launch.folder": str(folder),
        "launch.ranks": number,
    }
    began = time.time()
    launcher = subprocess.Popen(
        [sys.executable, "-c", CODE.format(changes=changes, way=way)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdin and launcher.stdout
    pressed = float(launcher.stdout.readline())
    run = folder / "tiny"
    values: dict[str, float] = {}
    ranks = [RankStart(run, rank) for rank in range(number)]
    while not all(rank.stepped for rank in ranks):
        if launcher.poll() not in (None, 0):
            raise SystemExit(f"the run has failed; see {run}")
        for rank in ranks:
            rank.look()
        time.sleep(POLL_S)
    values["launching process: CPU s"] = cpu_s(launcher.pid)
    values["wait to the end of the first step, s"] = time.time() - (began if way == COMMAND else pressed)
    record = read_json(run / "run.json") or {}
    supervisor = psutil.Process(record["pid"])
    values["supervisor: CPU s"] = cpu_s(supervisor.pid)
    below = supervisor.children(recursive=True)
    pids = [rank.pid for rank in ranks]
    values["between supervisor and ranks: CPU s"] = sum(cpu_s(each.pid) for each in below if each.pid not in pids)
    values["ranks: PSS, MiB"] = sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / 2**20
    for rank in ranks:
        for part, cost in rank.parts.items():
            name = f"rank, {part}: CPU s"
            values[name] = values.get(name, 0.0) + cost / number
        values["rank, sum: CPU s"] = values.get("rank, sum: CPU s", 0.0) + sum(rank.parts.values()) / number
    Run.open(run).wait()
    launcher.communicate()
    return values


class RankStart:
    """Follows one rank to the end of its first step, and adds up the CPU seconds of each part."""

    def __init__(self, run: Path, rank: int):
        self.run, self.rank = run, rank
        self.parts: dict[str, float] = {}
        self.stepped, self.pid = False, 0
        self._part, self._counted = "python and submitit", 0.0

    def look(self) -> None:
        """Add the CPU seconds since the last look to the part that the rank was in then."""
        status, beat = read_json(self.run / "logs" / f"rank{self.rank}.json"), read_heartbeat(self.run, self.rank)
        if self.stepped or not status:
            return
        self.pid = status["pid"]
        used = cpu_s(self.pid)
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


def main(rounds: int = 5, number: int = 2, checkouts: Sequence[Path] = ()) -> None:
    """Measure, and print a table with a column for each way, or for each checkout."""
    ways = [(checkout, COMMAND) for checkout in checkouts] or [(ROOT, way) for way in (COMMAND, COCKPIT, WARM)]
    measured: dict[tuple[Path, str], list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for checkout, way in ways:
            with tempfile.TemporaryDirectory() as folder:
                measured[checkout, way].append(start_once(checkout, Path(folder), number=number, way=way))
    names: dict[str, None] = {}
    for runs in measured.values():
        for run in runs:
            names.update(dict.fromkeys(run))
    print(
        f"medians of {rounds}, {number} ranks:", *(checkout if checkouts else way for checkout, way in ways), sep="  "
    )
    for name in names:
        figures = [f"{median(run.get(name, 0.0) for run in runs):8.2f}" for runs in measured.values()]
        print(f"{name:52}", *figures)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*numbers, checkouts=[Path(word).resolve() for word in sys.argv[3:]])
