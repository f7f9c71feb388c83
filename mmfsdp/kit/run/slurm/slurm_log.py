"""The log of a Slurm job: how the job ended, where neither the ranks nor squeue tell."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..files.reasons import ADVICE, BATCH_SCRIPT, JOB_MEMORY, LOST_PEER, NO_LOG, NO_PYTHON, NOT_STARTED
from ..files.run_record import RunState, Status, because, failed_first, first_failure
from ..files.snapshot import Snapshot
from ..ranks.silent_ranks import death_words
from .slow_start import field_of_line

_CANCELLED_LINE = re.compile(r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?))? \*\*\*")
"""Printed into the job's log by the daemon of its node: `CANCELLED AT 2026-01-01T12:00:00 DUE TO TIME LIMIT`."""
_CAUSES = {"": "CANCELLED", "TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}


JOB_LOG_BYTES, LAST_WORDS_BYTES = 40_000, 4000
"""Bytes of the end of a job's log that tell how it ended, and of a rank's log that are shown."""


def state_in_log(log: str) -> str:
    """Return Slurm's final state of a job by the job's own log, such as TIMEOUT; empty if the log has none."""
    causes = _CANCELLED_LINE.findall(log)
    return _CAUSES.get(causes[-1], "") if causes else ""


def lost_node(log: str) -> bool:
    """Return True if srun says that a node of the job has failed."""
    return "srun: error: Node failure on " in log


_NO_PYTHON = re.compile(r"No module named|not found|execve\(\)")
"""Words of Python, or of a shell, where the ranks' Python or this package is not there."""
_TASK_ERROR = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(r"Out Of Memory|oom.kill event|oom_kill", re.IGNORECASE)
"""Words of srun and of slurmstepd where the kernel has ended a rank that needed more than the job's memory."""
_CAUSE = re.compile(
    r"^(?:slurmstepd(?:-\S+)?|srun): error: (?!task|\S+: tasks? |\*\*\*)(.+)$"
    r"|^(?:pyxis: .*|error: pyxis: .*)$|^Lmod has detected the following error: *(.+)$",
    re.MULTILINE,
)
"""Lines in which Slurm, a plugin of it or Lmod says what is wrong; not those of srun on ranks."""
_TOLD_ERROR = re.compile(r"\[ERROR\] *(.+)$", re.MULTILINE)
"""The line of a log that a plugin prints, such as enroot's `[ERROR] URL ... returned error code: 401 Unauthorized`."""
_BY_SRUN = re.compile("Killed|Terminated|Exited with")
"""The end of ranks that srun ends because another one has failed; and that one may have ended so, too."""


class TaskError(NamedTuple):
    """A line of srun on ranks that ended badly."""

    node: str
    ranks: tuple[int, ...]
    error: str
    """The end of the task in words, such as `Killed`, `Aborted` or `Exited with exit code 1`."""


def task_errors(log: str) -> list[TaskError]:
    """Return the ranks that ended badly by what srun has printed, the first to end first."""
    errors = []
    for node, tasks, error in _TASK_ERROR.findall(log):
        ranks: list[int] = []
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            ranks += range(int(first), int(last or first) + 1)
        errors.append(TaskError(node, tuple(ranks), error))
    return errors


_RESTARTED = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT \S+ DUE TO (?:PREEMPTION|NODE FAILURE)[^\n]*\n")


def since_last_start(log: str) -> str:
    """Return a job's log from where Slurm has started it for the last time."""
    return _RESTARTED.split(log)[-1]


def failure_in_job(look: Snapshot, log: str) -> RunState | None:
    """Return the FAILED state of the rank that failed first, of ranks that srun has started; None if none has.

    srun ends the others as soon as one has failed, so that only its first line, or a crash, tells of a cause.

    log: what srun has printed.
    """
    statuses = look.reports
    reported, errors = first_failure(statuses), task_errors(log)
    crashes = [error for error in errors if not _BY_SRUN.match(error.error)]
    for error in crashes + errors[:1]:
        if any(statuses[rank].get("state") == "failed" for rank in error.ranks if rank < len(statuses)):
            break  # it has reported why
        return failed_first(_silent_death(look, error), reported)
    return _left_without_report(look, errors, reported) or reported


def _left_without_report(look: Snapshot, errors: list[TaskError], reported: RunState | None) -> RunState | None:
    """Return the state of the rank that ended with exit code 0 and no report, where another one lost its connection.

    srun tells of no rank that ends with 0, and of each that it ends itself. None where no rank has ended so.
    """
    if reported is None or reported.why.kind != LOST_PEER or look.exit_code is None:
        return None
    told = {rank for error in errors for rank in error.ranks}
    silent = [rank for rank, report in enumerate(look.reports) if report.get("state") == "running" and rank not in told]
    if len(silent) != 1:
        return None
    cause = f"rank {silent[0]} ended with exit code 0 and without a report, as by os._exit(0)"
    last_words = look.log(silent[0], size=LAST_WORDS_BYTES)
    return failed_first(because(Status.FAILED, cause, rank=silent[0], traceback=last_words), reported)


def cause_in_log(log: str) -> str:
    """Return the first error that Slurm or Lmod has printed, or the one that a plugin tells; "" if there is none."""
    found = _CAUSE.search(log)
    if found is None:
        return ""
    line = next((words for words in found.groups() if words), found[0])
    if told := _TOLD_ERROR.search(log):
        line = told[1]
    return line.strip()[:300]


def _silent_death(look: Snapshot, error: TaskError) -> RunState:
    """Return the state of a job whose first failed rank reported nothing at its end."""
    rank, words, kind = error.ranks[0], error.error, ""
    last_words = look.log(rank, size=LAST_WORDS_BYTES)
    if rank < len(look.reports) and not look.reports[rank]:
        cause = cause_in_log(look.log(0, size=JOB_LOG_BYTES))
        own_words = f": {cause}" if cause else _own_words(last_words)
        kind = NO_PYTHON if _NO_PYTHON.search(own_words) else NOT_STARTED
        words += f" before it started{own_words}"
    else:
        death, kind = death_words(look, rank)
        words += f", it {death}" if death else ""
        if not kind and _OUT_OF_MEMORY.search(f"{error.error}\n{look.log(0, size=JOB_LOG_BYTES)}"):
            words, kind = f"{words}: out of memory", JOB_MEMORY
    cause = f"rank {rank} on {error.node}: {words}"
    return because(Status.FAILED, cause, kind=kind, rank=rank, traceback=last_words)


def failure_without_rank(look: Snapshot, reason: str) -> RunState:
    """Return the state of a job that failed, where no rank did: what its log says. reason: Slurm's."""
    log = look.log(0, size=JOB_LOG_BYTES)
    lines = log.strip().splitlines()
    if lines:
        words, kind, fix = lines[-1][:500], "", ""
        if cause := cause_in_log(log):
            words += f": {cause}"
        if field := field_of_line(look):
            kind, fix = BATCH_SCRIPT, ADVICE[BATCH_SCRIPT].fix.format(field=field)
        elif not any(look.reports) and _NO_PYTHON.search(words):  # no rank has come to a person's own code
            kind = NO_PYTHON
        return because(Status.FAILED, words, kind=kind, fix=fix, traceback=log[-LAST_WORDS_BYTES:])
    words = f"the job left no log, and no rank has reported anything{f' ({reason})' if reason else ''}"
    fix = f"if its first node cannot see {look.folder}, put launch.folder where all nodes can write"
    return because(Status.FAILED, words, kind=NO_LOG, fix=fix)


def _own_words(log: str) -> str:
    """Return the last line that a rank has printed itself, not srun about it, after a colon; "" if there is none."""
    lines = [line for line in log.splitlines() if line.strip() and not re.match("srun: |slurmstepd", line)]
    return f": {lines[-1][:300]}" if lines else ""
