"""The state of a run that is a Slurm job: from the files of its ranks first, then from squeue and sacct."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .folder import last_line
from .local import is_here
from .named_hang import with_cause
from .never_starts import why_never
from .reasons import ADVICE, INTERRUPTED, JOB_MEMORY, NO_SUCH_JOB, NOT_ITS_JOB, TIME_LIMIT, Reason
from .record import (
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
from .slow_start import SLOW_START_S, batch_script, slow_start
from .slurm_log import JOB_LOG_BYTES, failure_in_job, failure_without_rank, lost_node, since_last_start, state_in_log
from .snapshot import Snapshot

PREEMPTED_FILE = "ranks.preempted"
"""File in logs/: the ranks were preempted and have saved, so the batch script requeues the job. See preempt.py."""
RESTART_COUNT = "SLURM_RESTART_COUNT"
"""Environment variable of a job: how often it was requeued; missing the first time."""

SQUEUE_INTERVAL_S = 20.0
"""Seconds between two calls of squeue by one process."""
COMMAND_TIMEOUT_S = 4.0
"""Seconds that a command of Slurm may take: a cancel calls two of them, and is to answer within 10 s."""
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
    """Return the run's Slurm job, such as 123 or 123_4; None before it is submitted."""
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
    rank0 = look.report(0)
    notes = (job.error,) if job.error else ()
    if job.state in WAITING and rank0.get("time", 0.0) < job.asked:
        if kind := why_never(job.reason):
            fix = ADVICE[kind].fix.format(job=number, timeout_min=record.timeout_min)
            words = f"job {number} will not start: {job.reason}"
            return replace(because(Status.QUEUED, words, kind=kind, fix=fix), notes=notes)
        return replace(because(Status.QUEUED, f"job {number} waits{_waiting_reason(job)}"), notes=notes)
    if job.state == "SUSPENDED":
        words = f"job {number} is suspended by Slurm; `scontrol resume` continues it"
        return replace(because(Status.SUSPENDED, words), notes=notes)
    if (look.folder / "logs" / PREEMPTED_FILE).exists():
        return because(Status.QUEUED, f"job {number}: preempted; requeued")
    if not job.state and not job.error:
        changed = max(look.values.get("submitted", 0.0), rank0.get("time", 0.0))
        if job.asked > changed + UNKNOWN_TIMEOUT_S:
            return _ended_state(Snapshot(look.folder), number, job)
    if not (job.state or job.error or rank0):
        return because(Status.QUEUED, f"job {number} was submitted")
    status = Status.QUEUED
    if look.rows():
        status = Status.RUNNING
    elif job.state or rank0:
        status = Status.STARTING
    if failure := first_failure(look.reports):
        return replace(failure, status=status, notes=notes)  # final once all ranks have ended
    words = f"job {number}" + (f" on {job.nodes}" if job.nodes else "")
    if job.state not in ("", "RUNNING"):
        words += f" (Slurm: {job.state})"  # such as CONFIGURING, while its nodes boot or a prolog runs
    elif slow := slow_start(look, batch_script(look)):
        words += f"; {slow}"
    return replace(because(status, words), notes=notes)


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
        by = f" ({job.reason})" if job.reason else ""
        return cancelled_state(look.folder, look.record, ENDED[job.state] + by)
    if first_failure(reports) and (failure := _failure(look)):
        return failure
    if not job.state and look.exit_code is None:
        return because(Status.LOST, f"Slurm no longer knows job {number}, and it left no result")
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


@dataclass(frozen=True)
class Job:
    """A job at one moment, in Slurm's words."""

    state: str = ""
    """Such as PENDING, RUNNING or NODE_FAIL; empty if Slurm does not know the job."""
    reason: str = ""
    start: str = ""
    """Local time when it started or is expected to; empty if unknown."""
    nodes: str = ""
    asked: float = 0.0
    """Time of Slurm's answer, in unix seconds; 0 if there was none yet."""
    error: str = ""
    """The reason why Slurm does not answer now."""


@dataclass
class _Queue:
    """The jobs of one user: one call of squeue answers for all of them."""

    asked: float = 0.0
    answered: float = 0.0
    error: str = ""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Jobs as squeue knows them; those that it has forgotten, as sacct knows them."""


_queues: dict[int, _Queue] = {}
_lock = threading.Lock()


def find_job(number: str, *, user: int) -> Job:
    """Return what Slurm says about a job of that user. Asks squeue at most every SQUEUE_INTERVAL_S seconds."""
    with _lock:
        queue = _queues.setdefault(user, _Queue())
        if not 0 <= time.time() - queue.asked < SQUEUE_INTERVAL_S:
            queue.asked, queue.error = time.time(), ""
            columns = "--format=%i|%T|%r|%S|%N"
            done = run_command("squeue", "--noheader", "--array", "--states=all", columns, f"--user={user}")
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                queue.error = f"squeue: {lines[-1] if lines else 'no answer'}"
            else:
                queue.answered, queue.jobs = time.time(), {}
                for known_number, *values in _rows(done.stdout, columns=5):
                    queue.jobs[known_number] = Job(*values)  # type: ignore[arg-type]  # state, reason, start, node
        if number not in queue.jobs and not queue.error:
            queue.jobs[number] = _accounted_job(number)
        return replace(queue.jobs.get(number, Job()), asked=queue.answered, error=queue.error)


def _accounted_job(number: str) -> Job:
    """Return what sacct says about a job; an empty Job where the cluster keeps no accounting."""
    columns = "--format=JobID,State,Start,NodeList"
    done = run_command("sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={number}")
    rows = _rows(done.stdout, columns=4)
    if done.returncode or not rows:
        return Job()
    _, state, start, nodes = rows[-1]
    state, _, reason = state.partition(" ")  # such as "CANCELLED by 1000"
    return Job(state, reason, start, nodes)


def job_error(folder: Path, number: str) -> Reason:
    """Return why a job must not be touched for a run; an empty reason if its batch script lies in the run's folder.

    A folder may name any job of whoever cancels its run.
    """
    done = run_command("squeue", "--noheader", "--array", "--states=all", "--format=%i|%o", f"--jobs={number}")
    if done.returncode:
        return slurm_error(done.stderr.strip() or "squeue: no answer")
    scripts = []
    for line in done.stdout.splitlines():
        of_job, bar, path = line.partition("|")  # a path may have a bar in it, too
        if bar and of_job.strip() == number:
            scripts.append(path.strip())
    if not scripts and done.stdout.strip():
        return Reason(f"squeue: its answer about job {number} cannot be read")
    if not scripts:
        return Reason(f"squeue: Invalid job id {number}", NO_SUCH_JOB)
    script = Path(scripts[-1])
    inner = script.parent  # FOLDER/logs; of an array, SWEEP/array_0, where a link of the task's number leads to FOLDER
    owner = inner.parent if inner.name == "logs" else inner / f"{int(number.partition('_')[2] or 0):03d}"
    with suppress(OSError):
        if os.path.samefile(owner, folder) and (inner.name == "logs" or "_" in number):
            return Reason()
    words = f"the folder names job {number}, whose batch script is {script}, so that job is not touched"
    return Reason(words, NOT_ITS_JOB, f"if it is yours, scancel {number} ends it")


def slurm_error(words: str) -> Reason:
    """Return what a command of Slurm says of a job, with its kind."""
    return Reason(words, NO_SUCH_JOB if "Invalid job id" in words else "")


def current_state(number: str) -> str:
    """Return Slurm's state of a job, asked for at this moment; empty if Slurm does not know it or does not answer."""
    done = run_command("squeue", "--noheader", "--states=all", "--format=%i|%T", f"--jobs={number}")
    rows = _rows(done.stdout, columns=2)
    return rows[-1][1] if rows and done.returncode == 0 else ""


def _rows(output: str, *, columns: int) -> list[list[str]]:
    """Return the cells of the lines that begin with a job's number; a site's wrapper may print banners, too."""
    rows = []
    for line in output.splitlines():
        cells = line.strip().split("|")
        if len(cells) == columns and cells[0][:1].isdigit():
            rows.append(["" if cell in ("None", "N/A", "(null)", "Unknown") else cell for cell in cells])
    return rows


def scancel(*arguments: str) -> Reason:
    """End a job, or send it a signal, by scancel. Return why that failed; an empty reason if it did not."""
    done = run_command("scancel", *arguments)
    return slurm_error(done.stderr.strip()) if done.returncode else Reason()  # a site's wrapper may print a banner


def run_command(
    *command: str, timeout: float = COMMAND_TIMEOUT_S, text: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. One that is missing or does not answer returns an error as if it had failed.

    text: what it reads. environment: instead of this process's.
    """
    if not shutil.which(command[0]):
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed here")
    environment = {**(os.environ if environment is None else environment), "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not answer within {timeout:g} s")
