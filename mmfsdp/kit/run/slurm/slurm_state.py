"""The state of a run that is a Slurm job: from the files of its ranks first, then from squeue and sacct."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files.folder import last_line
from ..files.reasons import ADVICE, INTERRUPTED, JOB_MEMORY, TIME_LIMIT, Reason
from ..files.run_record import (
    BEING_CANCELLED,
    RunRecord,
    RunState,
    Status,
    all_done,
    because,
    cancelled_state,
    first_failure,
    write_status,
)
from ..files.snapshot import Snapshot
from ..local import is_here
from ..ranks.named_hang import with_cause
from .job_id import as_arguments, job_words
from .never_starts import why_never
from .slow_start import SLOW_START_S, batch_script, slow_start
from .slurm_log import JOB_LOG_BYTES, failure_in_job, failure_without_rank, lost_node, since_last_start, state_in_log
from .slurm_queue import Job, find_job

PREEMPTED_FILE = "ranks.preempted"
"""File in logs/: the ranks were preempted and have saved, so the batch script requeues the job. See preempt.py."""
RESTART_COUNT = "SLURM_RESTART_COUNT"
"""Environment variable of a job: how often it was requeued; missing the first time."""

SUBMIT_TIMEOUT_S = 60.0
"""Seconds that a submission may take."""
PRETRAIN_TIMEOUT_S = 3600.0
"""Seconds more that it may take where backbones are pretrained first, as other machines see it."""
UNKNOWN_TIMEOUT_S = 30.0
"""Seconds after which Slurm should know a job that was submitted to it."""

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
"""Slurm's states of jobs that have not started, or not started again."""
ENDED = {
    "TIMEOUT": "the time limit was reached",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted, and this cluster does not requeue it",
    "FAILED": "",
    "COMPLETED": "",
    "CANCELLED": "cancelled by scancel or the cluster's administrators",
    "REVOKED": "moved to another cluster",
}
"""Slurm's final states of jobs -> the cause to show; empty where the ranks' own reports say more."""
KIND_OF_END = {"TIMEOUT": TIME_LIMIT, "OUT_OF_MEMORY": JOB_MEMORY}
"""Slurm's final states of jobs -> the kind of the cause."""


def slurm_state(look: Snapshot, record: RunRecord) -> RunState:
    """Return the state of a run on Slurm. A final state is written into the folder: Slurm forgets finished jobs."""
    state = look.status
    if state.done:
        # The job may be requeued after it had ended, by an administrator or because a node failed.
        finished, rank0 = look.values.get("finished", float("inf")), look.report(0)
        if rank0.get("state") != "running" or rank0.get("time", 0.0) <= finished:
            return state
    if look.job is None:
        return _state_before_job(look, record)
    state = _state_from_files(look) or _state_from_slurm(look, record, look.job)
    if look.cancelled and not state.ok:
        if state.done:
            state = cancelled_state(look.folder, record)
        else:
            state = replace(state, why=BEING_CANCELLED)
    if state.done:
        with suppress(OSError):  # another user's run: whoever looks next works it out again
            write_status(look.folder, state, finished=time.time())
    return state


def _state_before_job(look: Snapshot, record: RunRecord) -> RunState:
    """Return the state of a run that has no job yet, or whose submission was interrupted."""
    state, seconds = look.status, look.time - max(record.created, look.values.get("submitted", 0.0))
    submitting = look.supervised
    if not is_here(record):
        submitting = seconds < SUBMIT_TIMEOUT_S + (PRETRAIN_TIMEOUT_S if record.pretrains else 0.0)
    if submitting and state.status is Status.PREPARING:
        return replace(state, why=BEING_CANCELLED) if look.cancelled else state
    if submitting:
        words = "being submitted"
        if seconds > SLOW_START_S:
            words += f" for {seconds:.0f} s: sbatch does not answer; is Slurm busy (`scontrol ping`)?"
        return RunState(Status.QUEUED, state.why or Reason(words))
    if look.cancelled:
        return because(Status.CANCELLED, "cancelled")
    words = last_line(look.folder / "logs" / "supervisor.log")
    said = f"; its last words are: {words}" if words else ""
    return because(Status.LOST, f"its submission from {record.host} was interrupted{said}")


def job_number(folder: Path) -> str | None:
    """Return the run's Slurm job, such as 123, 123_4 or 123;gpu; None before it is submitted."""
    return Snapshot(folder).job


def _state_from_files(look: Snapshot) -> RunState | None:
    """Return the final state of a job whose ranks have all ended by themselves; None if only Slurm can tell.

    The ranks' own reports come first: srun ends with 0 also where a lost node has interrupted the ranks, and Slurm then
    requeues the job.
    """
    if look.exit_code is None:
        return None
    if all_done(look.reports):
        return RunState(Status.COMPLETED)
    if (look.folder / "logs" / PREEMPTED_FILE).exists():
        return because(Status.FAILED, "preempted, and not requeued", kind=INTERRUPTED)
    if lost_node(look.log(0, size=JOB_LOG_BYTES)) or first_failure(look.reports) is None:
        return None  # Slurm requeues a job that has lost a node
    return _failure(look)


def _state_from_slurm(look: Snapshot, record: RunRecord, number: str) -> RunState:
    """Return the state of a job that has not ended, as far as its files tell."""
    job = find_job(number, user=look.folder.stat().st_uid)
    if job.state in ENDED:
        return _ended_state(Snapshot(look.folder), number, job)  # its last files may be newer than the look
    last_sign = max(look.values.get("submitted", 0.0), _last_sign_of_ranks(look))
    if not job.state and job.answered and job.asked > last_sign + UNKNOWN_TIMEOUT_S:
        return _ended_state(Snapshot(look.folder), number, job)
    state = _state_of_waiting(look, record, number, job) or _state_of_started(look, number, job)
    return replace(state, notes=(job.note,)) if job.note else state


def _last_sign_of_ranks(look: Snapshot) -> float:
    """Return when rank 0 was last heard of, in unix seconds; 0 if it has reported nothing."""
    _, beat = look.beat(0) or ("", 0.0)
    return max(look.report(0).get("time", 0.0), beat)


def _state_of_waiting(look: Snapshot, record: RunRecord, number: str, job: Job) -> RunState | None:
    """Return the state of a job that Slurm has not started, or has stopped for a while; None if its ranks run."""
    if job.asked > _last_sign_of_ranks(look):  # else the ranks' own files are newer than Slurm's answer
        if job.state in WAITING:
            if kind := why_never(job.reason):
                fix = ADVICE[kind].fix.format(job=as_arguments(number), timeout_min=record.timeout_min)
                return because(Status.QUEUED, f"{job_words(number)} will not start: {job.reason}", kind=kind, fix=fix)
            return because(Status.QUEUED, f"{job_words(number)} waits{_waiting_reason(job)}")
        if job.state == "SUSPENDED":
            words = f"{job_words(number)} is suspended by Slurm; `scontrol resume` continues it"
            return because(Status.SUSPENDED, words)
    if (look.folder / "logs" / PREEMPTED_FILE).exists():
        return because(Status.QUEUED, f"{job_words(number)}: preempted; requeued")
    if not (job.state or look.report(0)):
        return because(Status.QUEUED, f"{job_words(number)} was submitted")
    return None


def _state_of_started(look: Snapshot, number: str, job: Job) -> RunState:
    """Return the state of a job that has started: from its ranks' files, with Slurm's words while there are none."""
    status = Status.RUNNING if look.last_row() else Status.STARTING
    if failure := first_failure(look.reports):
        return replace(failure, status=status)  # final once all ranks have ended
    words = job_words(number) + (f" on {job.nodes}" if job.nodes else "")
    if job.state not in ("", "RUNNING") and job.asked > _last_sign_of_ranks(look):
        words += f" (Slurm: {job.state})"  # such as CONFIGURING, while its nodes boot or a prolog runs
    elif slow := slow_start(look, batch_script(look)):
        words += f"; {slow}"
    return because(status, words)


def _waiting_reason(job: Job) -> str:
    """Return why a job waits and until when, such as ` (Resources), expected to start at 2026-01-31 14:05:00`."""
    text = f" ({job.reason})" if job.reason else ""
    if job.start:
        text += f", expected to start at {job.start.replace('T', ' ')}"
    return text


def _ended_state(look: Snapshot, number: str, job: Job) -> RunState:
    """Return the final state of a job that has ended, or that Slurm no longer knows."""
    reports = look.reports
    if all_done(reports):
        return RunState(Status.COMPLETED)
    if not job.state:  # no accounting, and squeue forgets a job after minutes
        job = replace(job, state=state_in_log(look.log(0, size=JOB_LOG_BYTES)))
    if job.state == "CANCELLED":
        by = f" ({job.reason})" if job.is_accounted and job.reason else ""  # squeue's reason is why the job waited
        return cancelled_state(look.folder, look.record, ENDED[job.state] + by)
    if first_failure(reports) and (failure := _failure(look)):
        return failure
    if not job.state and look.exit_code is None:
        return because(Status.LOST, f"Slurm no longer knows {job_words(number)}, and it left no result")
    if ENDED.get(job.state):
        return because(Status.FAILED, ENDED[job.state], kind=KIND_OF_END.get(job.state, ""))
    if look.exit_code == 0:
        return _interrupted_state(reports)
    return _failure(look) or failure_without_rank(look, job.reason)


def _failure(look: Snapshot) -> RunState | None:
    """Return the state of a job that has failed, with the rank that the others failed of; None if no rank failed."""
    failure = failure_in_job(look, since_last_start(look.log(0, size=JOB_LOG_BYTES)))
    return None if failure is None else with_cause(look, failure)


def _interrupted_state(statuses: list[dict[str, Any]]) -> RunState:
    """Return the state of a job that Slurm takes for successful though not every rank has reported that it finished."""
    unfinished = [str(rank) for rank, status in enumerate(statuses) if status.get("state") != "done"]
    ranks = f"rank {unfinished[0]}" if len(unfinished) == 1 else f"ranks {', '.join(unfinished[:8])}"
    if len(unfinished) > 8:
        ranks += f" and {len(unfinished) - 8} more"
    cause = f"the job ended before {ranks} finished: interrupted, as by a node that was set down"
    return because(Status.FAILED, cause, kind=INTERRUPTED)
