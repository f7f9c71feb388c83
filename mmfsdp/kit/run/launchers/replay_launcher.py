"""Replay: a run folder that a player writes from a recording. There are no ranks to start, to ask or to signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..files.run_record import RunRecord, RunState
from ..files.snapshot import Snapshot
from ..replay.player import replay_state
from .launcher import Launcher, StartedRanks


class Replay(Launcher):
    """A recording that is played; replay.py starts its player."""

    has_ranks = False
    has_supervisor = False
    place = "a replay"

    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Raise NotImplementedError."""
        raise NotImplementedError("a replay has no ranks")

    def state(self, look: Snapshot, record: RunRecord) -> RunState:
        """Return what the player has written last."""
        return replay_state(look, record)

    def stop(self, folder: Path, look: Callable[[], RunState], end: float) -> str:
        """Wait for the end of the player, which looks for the file `cancel`."""
        while not look().done:
            if time.monotonic() > end:
                words = "its player does not answer: if it has ended, the replay counts as cancelled a minute later"
                raise TimeoutError(f"{folder.name} is not cancelled yet: {words}")
            time.sleep(0.05)
        return ""
