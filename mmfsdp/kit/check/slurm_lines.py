"""Lines that a check of a Slurm cluster adds: on Slurm's commands, and on the job of the check.

The job's lines, in order: its submission, the queue, its ranks, a requeue, and its end by scancel. It is requeued as
after a preemption: rank 0 leaves the file by which the batch script calls `scontrol requeue` (kit/run/slurm/slurm.py).
Slurm holds a requeued job for two minutes, in which it is cancelled.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

from ...params import ParamError
from ..run.files.folder import last_log_lines
from ..run.files.reasons import NEVER_STARTS
from ..run.files.run_record import RunState, Status
from ..run.slurm.ask_slurm import ask_slurm
from ..run.slurm.job_id import job_words
from ..run.slurm.slow_start import SCRIPT_FILE
from ..run.slurm.slurm_queue import current_state
from ..run.slurm.slurm_state import PREEMPTED_FILE, SUBMIT_TIMEOUT_S, WAITING
from ..verify.lines import NOTE, OK, WRONG, Line
from .check_run import TIME_LIMIT_MIN, CheckRun, Tell

NO_ACCOUNTING = "accounting storage is disabled"
"""Part of sacct's words on a cluster that keeps no accounting, which a run can do without."""
SLOW_LOGIN_S, LOGIN_TIMEOUT_S = 5.0, 30.0
"""Seconds of a login shell: more are too slow, and after the second nobody waits any longer."""
LOGIN_NODE = "run this on a login node of the cluster, or where its commands are on PATH (`module avail slurm`)"
REQUEUE_WAIT_S = 60.0
POLL_S = 0.5
CANCEL_TIMEOUT_S = 60.0
"""Seconds that Slurm may take to end the job of the check."""


def command_lines(cluster: str) -> Iterator[Line]:
    """Yield a line for each command of Slurm that the machine which launches calls. cluster: as `ask_slurm` has it."""
    if shutil.which("sbatch"):
        version = ask_slurm("sbatch", "--version").stdout.strip()
        yield Line(OK, "sbatch", f"{version or 'it is there'} ({shutil.which('sbatch')})")
    else:
        words = "it is not on PATH here, so no job can be submitted"
        yield Line(WRONG, "sbatch", words, f"{LOGIN_NODE}; inside a Slurm job, launch.executor srun needs no sbatch")
    if shutil.which("bash"):
        yield _login_shell()
    yield _asked("squeue", cluster, "--noheader", "--format=%i", f"--user={os.getuid()}")
    yield _asked("sacct", cluster, "--noheader", "--allocations", "--format=JobID", "--starttime=now-1minutes")


def _login_shell() -> Line:
    """Return how long a login shell takes to start here: each batch script waits for one."""
    began = time.monotonic()
    done = ask_slurm("bash", "-l", "-c", "true", timeout=LOGIN_TIMEOUT_S)
    seconds = time.monotonic() - began
    fix = "look for what is slow, or waits for a lock, in ~/.bash_profile, ~/.profile, ~/.bashrc and what they call"
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
        return Line(WRONG, "login shell", f"`bash -l -c true`: {said[0]}; each job begins with it", fix)
    words = f"`bash -l -c true` takes {seconds:.1f} s, and each job begins with it"
    if seconds > SLOW_LOGIN_S:
        return Line(WRONG, "login shell", words, fix)
    return Line(OK, "login shell", words)


def _asked(command: str, cluster: str, *options: str) -> Line:
    """Return whether a command that knows the states of jobs answers."""
    done = ask_slurm(command, *options, cluster=cluster)
    words = done.stderr.strip().splitlines()[-1:] or [f"it ended with exit code {done.returncode}"]
    if done.returncode == 0:
        return Line(OK, command, "it answers")
    if command == "sacct":
        without = "the state of a job that has ended is then read from its files"
        if NO_ACCOUNTING in done.stderr.lower():
            return Line(NOTE, command, f"this cluster has no accounting: {without}")
        fix = f"ask the administrators whether slurmdbd runs; runs work without it: {without}"
        return Line(WRONG, command, words[0], LOGIN_NODE if done.returncode == 127 else fix)
    fix = LOGIN_NODE if done.returncode == 127 else "wait until Slurm's controller answers (`scontrol ping`)"
    return Line(WRONG, command, f"{words[0]}: the state of runs is then read from their files only", fix)


def job_lines(check: CheckRun, tell: Tell, wait_s: float) -> Iterator[Line]:
    """Yield the lines of a check whose ranks are a job. wait_s: seconds that it may wait in the queue."""
    run = check.run
    assert run is not None
    # sbatch may itself wait, as for a busy controller.
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
    # Rank 0 leaves the file once it has found all; then the batch script asks for the requeue.
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
