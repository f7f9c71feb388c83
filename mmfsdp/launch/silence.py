"""Ranks that stop answering: stopped by a signal, or hung. Each one's signs of life (runs.Beat) tell."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil

from ..runs import RunRecord, Status, beat_path
from ..runs.state import last_log_lines

SLOW = 5
"""How much longer than others the first step and checkpoints may take, and any step than the longest so far."""
PHASES = ("starting", "joining", "building", "measuring", "wrapping", "taking", "step", "trained")
"""First words of what ranks say that they do, in order."""
DUMP = 0.5
"""Seconds in which a rank that is asked for its stack writes it into its log."""


class Silence:
    """Watches the ranks of one run for signs of life; those from before `since` (unset: now) are of an earlier life."""

    def __init__(self, folder: Path, record: RunRecord, *, since: float | None = None):
        self.folder, self.limit, self.ranks = folder, record.silence_s, record.ranks
        self.longest, self.since = 0.0, time.time() if since is None else since
        self.beats: dict[int, tuple[float, str]] = {}
        self.stopped: dict[int, float] = {}

    def verdict(self, ranks: dict[int, psutil.Process]) -> dict[str, Any] | None:
        """The verdict on the rank that stopped answering; None while all of them go on.

        ranks: the processes that can be looked at; of the others, only what they write is known.
        """
        for rank, process in ranks.items():
            if not self._is_stopped(process):
                self.stopped.pop(rank, None)
            elif time.monotonic() - self.stopped.setdefault(rank, time.monotonic()) > self.limit:
                return self._failed(rank, "it is stopped by a signal", ranks)
        for rank in range(self.ranks):
            self._listen(rank)
        if not self.beats or time.time() - max(at for at, _ in self.beats.values()) < self._patience():
            return None  # as long as one goes on, so do the others: they meet in every step
        if self.stopped:
            return self._failed(min(self.stopped), "it is stopped by a signal", ranks)
        rank = min(self.beats, key=lambda rank: _progress(self.beats[rank][1]))  # the one that the others wait for
        return self._failed(rank, "it hangs", ranks)

    def _listen(self, rank: int) -> None:
        path = beat_path(self.folder, rank)
        try:
            at, doing = path.stat().st_mtime, path.read_text().strip()
        except FileNotFoundError:
            return
        if at < self.since:
            return
        before, did = self.beats.get(rank, (at, doing))
        if did.startswith("step") and "save" not in did and before != at:
            self.longest = max(self.longest, at - before)
        self.beats[rank] = (at, doing)

    def _patience(self) -> float:
        doing = [doing for _, doing in self.beats.values()]
        if not self.longest or any("save" in what or not what.startswith("step") for what in doing):
            return SLOW * self.limit
        return max(self.limit, SLOW * self.longest)

    def _failed(self, rank: int, why: str, ranks: dict[int, psutil.Process]) -> dict[str, Any]:
        _, doing = self.beats.get(rank, (0.0, "start"))
        if why == "it hangs" and rank in ranks:
            self._ask_for_stack(ranks[rank])
        reason = f"rank {rank} does not answer (in {doing}): {why}; the limit is launch.silence_s, {self.limit:g} s"
        return {"status": Status.FAILED, "reason": reason, "rank": rank, "traceback": last_log_lines(self.folder, rank)}

    def _ask_for_stack(self, process: psutil.Process) -> None:
        try:
            process.send_signal(signal.SIGUSR1)
            time.sleep(DUMP)
        except psutil.Error:
            return  # it went just now: the log has what there is

    @staticmethod
    def _is_stopped(process: psutil.Process) -> bool:
        try:
            return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False


def _progress(doing: str) -> tuple[int, int, int]:
    """How far a rank is, by what it said last: `step 5 compute` is further than `step 5 data`."""
    what, _, rest = doing.partition(" ")
    what = what.rstrip(":,")
    phase = PHASES.index(what) if what in PHASES else -1
    if what != "step":
        return phase, 0, 0
    step, _, part = rest.partition(" ")
    return phase, int(step), ("data", "compute", "save").index(part)
