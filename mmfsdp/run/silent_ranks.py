"""Ranks that ended without a report: what their logs tell of it."""

from __future__ import annotations

from pathlib import Path

from ..hangs.stacks import crash
from .folder import last_log_lines, read_heartbeat
from .record import advice, library_error


def death_words(folder: Path, rank: int) -> str:
    """Return what ended a rank, by its log: a library in C++, or a crash; "" where the log has neither.

    Such as `was ended by a library (in step 2 compute): MESSAGE` or `crashed (in step 2 compute): Segmentation fault in
    step (train.py, line 9)`.
    """
    log = last_log_lines(folder, rank, size=64_000)
    beat = read_heartbeat(folder, rank)
    activity = f" (in {beat[0]})" if beat else ""
    if error := library_error(log):
        return f"was ended by a library{activity}: {error}{advice(error)}"
    if words := crash(log):
        return f"crashed{activity}: {words}"
    return ""
