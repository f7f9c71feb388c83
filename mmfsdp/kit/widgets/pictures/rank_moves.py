"""Tell whether the ranks of a `%%ranks` cell do anything: what each of them computes, and if it waits for others.

On a busy machine a rank that computes may get next to nothing of a core for seconds. So ranks are deadlocked only if
all of them sleep, and one of them waits in a call of torch.distributed.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ....own.modules import is_persons_file
from ...hangs.entered import RankRecord
from ...hangs.stacks import Frame

IDLE_S = 4
"""Seconds in which no rank does anything, after which they are asked for whom they wait."""
IDLE_SHARE = 0.01
"""Share of a core that an idle rank uses at most: ranks that wait for each other use less."""
_CALLS_WAIT = re.compile(r"\.wait\(")
_DISTRIBUTED = re.compile(r"/torch/distributed/")


class Moves:
    """Tells whether ranks have done nothing for IDLE_S, from looks at each of them."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, dict[int, float]]] = []
        """The looks of the last IDLE_S: the time, and the CPU seconds of each process until then."""

    def are_none(self, now: float, cpu_seconds: Mapping[int, float], *, can_run: bool) -> bool:
        """Add a look; return True if the same processes have done nothing for IDLE_S.

        cpu_seconds: of each process, by its id. can_run: a thread of one of them computes, or waits for a core to
        compute on, or for a disk.
        """
        others_before = bool(self._looks) and self._looks[-1][1].keys() != cpu_seconds.keys()
        if can_run or others_before:
            self._looks.clear()
        self._looks.append((now, dict(cpu_seconds)))
        since, before = self._looks[0]
        if now - since < IDLE_S:
            return False
        self._looks.pop(0)
        return all(cpu_seconds[pid] - before[pid] < IDLE_SHARE * (now - since) for pid in cpu_seconds)


def cpu_seconds_of(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU seconds that each process has used."""
    return {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids}


def can_run(pid: int) -> bool:
    """Return True if a thread of a process runs, waits for a core or waits for a disk. Only Linux tells."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # this thread has ended
            state = file.read_text(errors="replace").rpartition(")")[2].split()[0]
            if state in ("R", "D"):
                return True
    return False


def one_waits(records: Mapping[int, RankRecord], frames: Mapping[int, list[Frame]], at_end: Iterable[int]) -> bool:
    """Return True if a rank waits for others, by its flight recorder or its stack.

    at_end: the ranks that have run the cell, and wait until the others have run it, too.
    """
    for rank in {*records, *frames} - {*at_end}:
        record = records.get(rank)
        if (record and record.waits_in) or waits_for_others(frames.get(rank, [])):
            return True
    return False


def waits_for_others(frames: list[Frame]) -> bool:
    """Return True if a stack ends in a call of torch.distributed, such as `recv`: gloo's flight recorder has no `recv`.

    `wait` of what `irecv` returns is a function in C++, and so has no frame: its call is in the person's line.
    """
    if not frames:
        return False
    innermost = frames[0]
    if _DISTRIBUTED.search(innermost.file):
        return True
    line = linecache.getline(innermost.file, innermost.line)
    return is_persons_file(innermost.file) and bool(_CALLS_WAIT.search(line))
