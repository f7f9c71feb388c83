"""Kill a rank of a run on purpose, to show what becomes of the others, and that the run can be resumed."""

from __future__ import annotations

import signal
from pathlib import Path

from ...params import ParamError
from .files.breaks import KILLED
from .files.folder import add_event
from .files.snapshot import Snapshot
from .launchers.registry import check_no_replay, launcher_of
from .local import signal_rank
from .state import run_state


def kill_rank(folder: Path, rank: int) -> None:
    """Send SIGKILL to the process of one rank, as Linux does for lack of memory. Returns immediately.

    The run fails. Raises ParamError if that rank is not running, or is not a process of this machine.
    """
    check_no_replay(folder, "broken: it plays what the recorded run went through")
    look = Snapshot(folder)
    state, record = run_state(look), look.record
    status = look.report(rank) if record is not None and rank < record.ranks else {}
    if record is None or state.done or status.get("state") != "running":
        raise ParamError("run", f"{folder} is {state}; rank {rank} is not running, so that nobody can kill it")
    launcher = launcher_of(folder, record)
    if not launcher.here:
        raise ParamError("run", f"the ranks of {folder} belong to its scheduler; kill only those of a local run")
    if error := launcher.cannot_signal(folder, record):
        raise ParamError("run", error)
    # Before the signal: whoever sees the rank's end must find the reason.
    add_event(folder, KILLED, step=state.step, text=f"rank {rank} was killed on purpose", rank=rank)
    signal_rank(folder, record, status, signal.SIGKILL)
