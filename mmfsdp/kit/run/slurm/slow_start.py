"""Tell for what a run waits before its ranks report, where that takes long: it has started, and prints nothing.

A Slurm job begins with the start files of a login shell, modules and setup, then srun, which may bring the image of a
container; then Python reads its files, on many clusters from a network disk. A file has the line of the script.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from ...hangs.words import ranks_words
from ..files.folder import NO_FILE, last_line, log_paths
from ..files.snapshot import Snapshot

SCRIPT_FILE = "ranks.line"
"""File in logs/: the line that the batch script is at. There is none while its login shell reads its start files."""
STARTS_RANKS = "srun"
"""The content of that file once the ranks are started."""
LOGIN = "its login shell has read start files, such as ~/.bash_profile,"
SLOW_RANKS = "Python may be read from a slow disk, or the image of a container is brought"

SLOW_START_S = 20.0
"""Seconds after which a person is told what the run waits for."""


class Began(NamedTuple):
    """Say how far the start of a run's ranks is."""

    line: str
    """The line that the batch script is at; STARTS_RANKS once the ranks are started."""
    since: float
    """Since when, in unix seconds; 0 if nothing has started."""


def slow_start(look: Snapshot, began: Began) -> str:
    """Return what a run waits for while ranks have not reported, and for how long; "" as long as that is not slow.

    began: what `ranks_call` or `batch_script` returns.
    """
    missing = [rank for rank, report in enumerate(look.reports) if not report]
    line, since = began
    seconds = look.time - since
    if not missing or since == 0.0 or seconds < SLOW_START_S:
        return ""
    if line == STARTS_RANKS:
        words = f"{ranks_words(missing)} started {seconds:.0f} s ago and reported nothing yet: {SLOW_RANKS}"
    elif line:
        words = f"its batch script is in `{line}` for {seconds:.0f} s: what is slow there?"
    else:
        words = f"{LOGIN} for {seconds:.0f} s: what is slow there?"
    said = [last_line(path) for rank, path in log_paths(look.folder) if rank == missing[0] or line != STARTS_RANKS]
    return f"{words}; its last words are: {said[-1]}" if said and said[-1] else words


def field_of_line(look: Snapshot) -> str:
    """Return the field of the line that the batch script is at before it starts the ranks, such as launch.setup."""
    field, colon, _ = (look.text(f"logs/{SCRIPT_FILE}") or "").partition(": ")
    return field if colon else ""


def ranks_call(look: Snapshot) -> Began:
    """Return how far ranks are that start at once, after submitit has written their call."""
    try:
        calls = [path.stat().st_mtime for path in (look.folder / "logs").glob("*_submitted.pkl")]
    except NO_FILE:
        calls = []
    return Began(STARTS_RANKS, max(calls, default=0.0))


def batch_script(look: Snapshot) -> Began:
    """Return how far the batch script of a Slurm job is, whose log Slurm's daemon makes when it starts the script."""
    line = look.text(f"logs/{SCRIPT_FILE}")
    if line is not None:
        with suppress(*NO_FILE):
            return Began(line.strip(), (look.folder / "logs" / SCRIPT_FILE).stat().st_mtime)
    submitted = look.values.get("submitted", 0.0)
    times = [path.stat().st_mtime for rank, path in log_paths(look.folder) if rank == 0]
    # Much older ones are of an earlier job; this one may have started before its number was written down.
    return Began("", max([at for at in times if at > submitted - SLOW_START_S], default=0.0))
