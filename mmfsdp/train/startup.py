"""Where the seconds go from launch() to the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import torch.distributed as dist

from .. import runs

WORDS = {
    "starting": "parameters",
    "joining": "the ranks meet",
    "building": "model and plan",
    "measuring": "the machine's rates",
    "wrapping": "wrapping",
    "taking up": "optimizer, checkpoint, data",
}
"""What a rank says it is about to do (runs.Beat), and what it is called."""

CLOCKS = 2.0
"""Seconds by which the word of the system on when a process began may be off: it counts in whole ones."""


def startup(folder: Path, beat: runs.Beat) -> dict[str, float]:
    """Seconds from launch() to now, the end of the first step, by part; on a later life of a run from this process's
    start. Rank 0 tells them, and nothing more is marked."""
    born, now = psutil.Process(os.getpid()).create_time(), time.time()
    record = runs.RunRecord.read(folder)
    parts, before, name = {}, born, "imports"
    if record is not None and -CLOCKS <= born - record.created < 3600 and not runs.last_row(folder):
        before = max(born, record.created)
        parts["processes"] = before - record.created
    for doing, at in [*beat.started(), ("", now)]:
        parts[name] = parts.get(name, 0.0) + at - before
        before, name = at, WORDS.get(doing.split(":")[0], "the first step")
    split = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds >= 0.05)
    if dist.get_rank() == 0:
        print(f"first step after {sum(parts.values()):.1f} s: {split}")
    return {name: round(seconds, 3) for name, seconds in parts.items()}
