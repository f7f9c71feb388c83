"""`python -m mmfsdp.launch.queue SWEEP`: starts a sweep's members, a few at a time, until none is left; on Slurm it
submits them as one job array."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from filelock import FileLock

from ..runs import is_run, run_state, write_json
from .array import submit_array
from .start import launch
from .sweeps import LOCK, Sweep

POLL = 0.3
"""Seconds between two looks at the members."""


def work(sweep: Sweep) -> None:
    """Start members while there are some, fewer run than may, and nobody has cancelled the sweep."""
    if sweep.shared.launch.executor.value == "slurm":
        return submit_array(sweep, [name for name in sweep.members if _waits(sweep.path, name)])
    at_once, entry = sweep._read("at_once", 1), sweep._read("entry", "")
    while not (sweep.path / "cancel").exists():
        started = [sweep.path / name for name in sweep.members if is_run(sweep.path / name)]
        running = [path for path in started if not run_state(path).done]
        waiting = [name for name in sweep.members if _waits(sweep.path, name)]
        if not waiting and not running:
            return
        for name in waiting[: max(0, at_once - len(running))]:
            _start(sweep, name, entry)
        time.sleep(POLL)


def _waits(folder: Path, name: str) -> bool:
    new = not (folder / name).exists() and not (folder / f"{name}.refused").exists()
    return new or (folder / f"{name}.again").exists()


def _start(sweep: Sweep, name: str, entry: str) -> None:
    for mark in ("again", "refused"):
        (sweep.path / f"{name}.{mark}").unlink(missing_ok=True)
    try:
        if is_run(sweep.path / name):
            sweep.run(name).resume()
        else:
            launch(sweep.params(name), entry=entry, linted=sweep._read("linted", False))
    except Exception as error:  # the others have their turn all the same
        write_json(sweep.path / f"{name}.refused", {"reason": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    found = Sweep.open(sys.argv[1])
    with FileLock(found.path / LOCK, timeout=5):  # one queue at a time; the last may be about to end
        work(found)
