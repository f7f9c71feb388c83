"""The state of a run whose ranks are processes that a supervisor has started."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from .files.folder import last_line
from .files.reasons import GONE, NO_SIGN, Reason
from .files.run_record import (
    BEING_CANCELLED,
    RunRecord,
    RunState,
    Status,
    all_done,
    because,
    cancelled_state,
    first_failure,
)
from .files.snapshot import Snapshot
from .local import is_here, is_stopped, processes_of
from .slurm.slow_start import ranks_call, slow_start

OTHER_HOST_TIMEOUT_S = 180.0
"""Seconds without a sign of life after which a run on another machine is lost; clocks and caches differ."""


def local_state(look: Snapshot, record: RunRecord) -> RunState:
    """Return the state of a run whose ranks are processes of one machine, or a step of a job."""
    state = look.status
    if state.done:
        return state
    if state.status is Status.STARTING and look.last_row():
        state = replace(state, status=Status.RUNNING)
    if not is_here(record):  # all that is known is in its files
        silence_s = silence_of(look, record)
        if silence_s > OTHER_HOST_TIMEOUT_S:
            return because(Status.LOST, f"no sign of life from {record.host} for {silence_s:.0f} s", kind=NO_SIGN)
        state = replace(state, why=state.why or Reason(f"its processes are on {record.host}, not on this machine"))
    elif not look.supervised and processes_of(record, look.folder):
        return replace(state, why=Reason("its supervisor was killed; the ranks are still running"))
    elif not look.supervised:
        return _state_after_death(look)
    if look.cancelled:
        return replace(state, why=BEING_CANCELLED)
    if is_here(record) and is_stopped(record.pid):
        words = f"its supervisor, process {record.pid}, is stopped, and nobody watches the ranks: "
        return replace(state, why=Reason(f"{words}`kill -CONT {record.pid}` lets it go on"))
    if state.status is Status.STARTING and not state.why:
        state = replace(state, why=Reason(slow_start(look, ranks_call(look))))
    return state


def silence_of(look: Snapshot, record: RunRecord) -> float:
    """Return the seconds since a run on another machine last gave a sign of life.

    The supervisor writes the time of its machine into status.json, and rank 0 into its metrics: that of a file is the
    file server's, whose clock may differ.
    """
    alive = look.values.get("alive", record.created)
    return float(look.time - max(alive, look.last_row().get("time", 0.0)))


def _state_after_death(look: Snapshot) -> RunState:
    """Return the state of a run that has no process left, from what the ranks reported."""
    if look.cancelled:
        return cancelled_state(look.folder, look.record)
    if all_done(look.reports):
        return RunState(Status.COMPLETED)
    cause = "its processes are gone without a result: killed, no disk space, or the machine was restarted"
    with suppress(OSError):  # another person may not read it
        words = last_line(look.folder / "logs" / "supervisor.log")
        cause += words and f"; its supervisor's last words are: {words}"
    return first_failure(look.reports) or because(Status.LOST, cause, kind=GONE)
