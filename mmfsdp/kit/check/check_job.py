"""Lines on the Slurm job of a check, in order: its submission, the queue, its ranks, a requeue, and its end by scancel.

A job is requeued as after a preemption: rank 0 leaves the file by which the batch script calls `scontrol requeue`
(kit/run/slurm/slurm.py). Slurm holds a requeued job for two minutes, in which it is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ...params import ParamError
from ..run.files.folder import last_log_lines
from ..run.files.reasons import NEVER_STARTS
from ..run.files.run_record import RunState, Status
from ..run.slurm.job_id import job_words
from ..run.slurm.slow_start import SCRIPT_FILE
from ..run.slurm.slurm_queue import current_state
from ..run.slurm.slurm_state import PREEMPTED_FILE, SUBMIT_TIMEOUT_S, WAITING
from ..verify.lines import NOTE, OK, WRONG, Line
from .check_run import TIME_LIMIT_MIN, CheckRun

REQUEUE_WAIT_S = 60.0
POLL_S = 0.5
CANCEL_TIMEOUT_S = 60.0
"""Seconds that Slurm may take to end the job of the check."""

Tell = Callable[[str], object]


def job_lines(check: CheckRun, tell: Tell, wait_s: float) -> Iterator[Line]:
    """Yield the lines of a check whose ranks are a job. wait_s: seconds that it may wait in the queue."""
    run = check.run
    assert run is not None
    state = check.wait(tell, SUBMIT_TIMEOUT_S, until=lambda _: run.job is not None)
    if run.job is None:
        words, fix = state.why.text or "sbatch did not answer", state.why.what_to_do or "ask the administrators"
        yield Line(WRONG, "submission", words, fix)
        return
    began = time.monotonic()
    yield Line(OK, "submission", job_words(run.job))
    state = check.wait(tell, wait_s, until=lambda state: _has_started(check, state) or _never_starts(state))
    if not (state.done or _has_started(check, state)):
        yield _queue_line(state, wait_s)
        yield _scancel_line(check)
        return
    if _ended_in_queue(check, state):
        words = f"{job_words(run.job)} ended before it started: {state.reason or state.status.lower()}"
        yield Line(WRONG, "queue", words, "check again; ask who has cancelled it, if it was not you")
        return
    yield Line(OK, "queue", f"{job_words(run.job)} has started after {time.monotonic() - began:.0f} s")
    preempted = run.path / "logs" / PREEMPTED_FILE
    state = check.wait(tell, 60.0 * (TIME_LIMIT_MIN + 1), until=lambda _: preempted.exists())
    is_requeued = preempted.exists() and _is_requeued(check, run.job)
    yield from check.lines(state)
    if check.asks_requeue and check.facts():
        yield _requeue_line(check, is_requeued)
    elif not check.asks_requeue:
        words = "launch.sbatch has no-requeue: a preempted run ends, and `mmfsdp resume` continues it"
        yield Line(NOTE, "requeue", words)
    if is_requeued or not run.state().done:
        yield _scancel_line(check)


def _has_started(check: CheckRun, state: RunState) -> bool:
    return state.status is not Status.QUEUED or bool(check.facts())


def _ended_in_queue(check: CheckRun, state: RunState) -> bool:
    """Return True for a job that was cancelled, or is gone, before its batch script ran."""
    assert check.run is not None
    has_run = (check.run.path / "logs" / SCRIPT_FILE).exists() or check.facts()
    return state.status in (Status.CANCELLED, Status.LOST) and not has_run


def _never_starts(state: RunState) -> bool:
    return state.why.kind in NEVER_STARTS


def _queue_line(state: RunState, wait_s: float) -> Line:
    """Return the line of a job that does not start."""
    if _never_starts(state):
        return Line(WRONG, "queue", state.why.text, state.why.fix)
    words = f"after {wait_s / 60:.3g} min the job has not started: {state.reason}"
    fix = "check again when the partition is less busy, with --wait MINUTES, or on another launch.partition"
    return Line(WRONG, "queue", words, fix)


def _is_requeued(check: CheckRun, job: str) -> bool | None:
    """Return whether Slurm puts the job into the queue again, once its batch script asks; None if it does not say."""
    assert check.run is not None
    end = time.monotonic() + REQUEUE_WAIT_S
    known: str | None = None
    while time.monotonic() < end:
        known = current_state(job)
        if check.is_restarted or known in WAITING:
            return True
        if check.run.state().done:
            return False
        time.sleep(POLL_S)
    return None if known is None else False


def _requeue_line(check: CheckRun, is_requeued: bool | None) -> Line:
    """Return whether a preempted run would be started again by itself."""
    assert check.run is not None
    if is_requeued:
        return Line(OK, "requeue", "the job was requeued, as after a preemption")
    if is_requeued is None:
        words = f"Slurm does not answer squeue within {REQUEUE_WAIT_S:.0f} s, so nobody knows whether it was requeued"
        return Line(NOTE, "requeue", words)
    # The batch script writes into rank 0's log, after that has ended.
    said = [line.strip() for line in last_log_lines(check.run.path, 0).splitlines() if line.strip()]
    words = f"the job was not requeued: {said[-1][:300] if said else 'scontrol requeue had no effect'}"
    fix = "ask the administrators whether users may call `scontrol requeue` on nodes; if not, add no-requeue to "
    return Line(WRONG, "requeue", words, f"{fix}launch.sbatch, and continue preempted runs with `mmfsdp resume`")


def _scancel_line(check: CheckRun) -> Line:
    """Cancel the job, and return whether that works."""
    assert check.run is not None
    try:
        state = check.run.cancel(timeout=CANCEL_TIMEOUT_S)
    except (TimeoutError, ParamError, OSError) as error:
        fix = "ask the administrators whether you may call scancel; this job ends by itself as soon as it starts"
        return Line(WRONG, "scancel", f"{error}", fix)
    if not state.done:
        return Line(NOTE, "scancel", f"{job_words(check.run.job or '')} is {state}")
    return Line(OK, "scancel", f"{job_words(check.run.job or '')} is cancelled")
