"""FilesAlone: a run whose launcher is somebody's own code that is not run here. It is known by its files alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import Signals

from ....params import ParamError
from ..files.reasons import NO_SIGN, Reason
from ..files.run_record import BEING_CANCELLED, RunRecord, RunState, Status, because
from ..files.snapshot import Snapshot
from ..local_state import OTHER_HOST_TIMEOUT_S, silence_of
from .launcher import Launcher, StartedRanks

NOT_RUN = "its launcher, {executor}, is own code that somebody else may have written, and is not run"
FIX = "read that code; Run.trust() lets this process run it"


class FilesAlone(Launcher):
    """A launcher that nobody asks: what a run's folder says is all that is known."""

    def start(self, folder: Path, record: RunRecord, *, port: int) -> StartedRanks:
        """Raise ParamError."""
        raise ParamError("launch.executor", _words(record))

    def state(self, look: Snapshot, record: RunRecord) -> RunState:
        """Return the state that the files tell."""
        state = look.status
        if state.done:
            return state
        silence_s = silence_of(look, record)
        if silence_s > OTHER_HOST_TIMEOUT_S:
            return because(Status.LOST, f"no sign of life from {record.host} for {silence_s:.0f} s", kind=NO_SIGN)
        if state.status is Status.STARTING and look.last_row():
            state = replace(state, status=Status.RUNNING)
        if look.cancelled:
            return replace(state, why=BEING_CANCELLED)
        return replace(state, why=state.why or Reason(NOT_RUN.format(executor=record.executor)))

    def stop(self, folder: Path, look: Callable[[], RunState], end: float) -> str:
        """Wait for the end of a run whose own processes look for the file `cancel`."""
        while not look().done:
            if time.monotonic() > end:
                raise TimeoutError(f"{folder.name} is still running after its cancel: {look()}")
            time.sleep(0.05)
        return ""

    def cannot_signal(self, folder: Path, record: RunRecord) -> str:
        """Return that nobody knows how to signal the ranks."""
        return f"{folder}: {_words(record)}"

    def print_stack(self, folder: Path, record: RunRecord, rank: int, number: Signals) -> bool:
        """Return False: the ranks are not reached."""
        return False


def _words(record: RunRecord) -> str:
    return f"{NOT_RUN.format(executor=record.executor)}; {FIX}"
