"""Slurm's word on jobs: squeue is asked for all jobs of a user at once, then sacct for those that it has forgotten.

They are asked in a thread of their own. Whoever looks at a run gets the newest answer that is there, with its age, and
waits only where there is none, for a short time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..files.reasons import NO_SUCH_JOB, NOT_ITS_JOB, Reason
from .ask_slurm import ask_slurm, limit_s
from .job_id import as_arguments, cluster_of, job_words, number_of

SQUEUE_INTERVAL_S = 20.0
"""Seconds between two questions of one process."""
OLD_ANSWER_S = 3 * SQUEUE_INTERVAL_S
"""Seconds after which an answer is old: a look waits for a newer one, and tells its age if there is none."""
PATIENCE_S = 3.0
"""Seconds that looks wait for the answer to one question."""

SACCT_OPTIONS = ("--noheader", "--parsable2", "--allocations", "--format=JobID,State,Start,NodeList")


@dataclass(frozen=True)
class Job:
    """A job at one moment, in Slurm's words."""

    state: str = ""
    """Such as PENDING, RUNNING or NODE_FAIL; empty if Slurm does not know the job, or has not answered yet."""
    reason: str = ""
    """The reason why it waits, of squeue; or by whom it was cancelled, such as `by 1000`, of sacct."""
    start: str = ""
    """Local time when it started or is expected to; empty if unknown."""
    nodes: str = ""
    script: str = ""
    """The batch script of the job; empty if unknown."""
    asked: float = field(default=0.0, kw_only=True)
    """Time when Slurm was asked for this answer, in unix seconds; 0 if there is none yet."""
    is_accounted: bool = field(default=False, kw_only=True)
    """The answer is sacct's: the job has left the queue."""
    note: str = field(default="", kw_only=True)
    """Note that Slurm has not answered for long, or what it says in place of an answer."""

    @property
    def answered(self) -> bool:
        """True if Slurm has answered: with a state, or that it does not know the job."""
        return self.asked > 0.0


class Queue:
    """The jobs of one user on one cluster, by their numbers, as they were when Slurm last answered."""

    def __init__(self, user: int, cluster: str = "") -> None:
        self.user, self.cluster = user, cluster
        self.jobs: dict[str, Job] = {}
        """The jobs as squeue knows them; those that it has forgotten, as sacct knows them, or empty."""
        self.wanted: set[str] = set()
        """Jobs that somebody has looked for since the last question was answered."""
        self.asked_for: set[str] = set()
        """The jobs that the last question was about."""
        self.began = self.answered = 0.0
        """Times when the last question was asked, and the last that was answered, in unix seconds."""
        self.error = ""
        self._asks = threading.Condition()
        self._thread: threading.Thread | None = None

    def find(self, number: str) -> Job:
        """Return what Slurm says of a job. Ask if it was not asked lately; wait if nothing is known that counts."""
        with self._asks:
            self.wanted.add(number)
            self._ask_if_due(number)
            while self._thread and self._is_old(number):
                patience = self.began + PATIENCE_S - time.time()
                if patience <= 0 or not self._asks.wait(patience):
                    break
                self._ask_if_due(number)  # the question that was just answered may not have been about this job
            job = self.jobs.get(number, Job())
            return replace(job, note=self._note(number))

    def expect(self, numbers: Collection[str]) -> None:
        """Ask for all these jobs at once, if one of them is not known."""
        with self._asks:
            self.wanted.update(numbers)
            for number in numbers:
                self._ask_if_due(number)

    def wait(self, timeout: float) -> None:
        """Wait until no question is open, at most so many seconds."""
        with self._asks:
            self._asks.wait_for(lambda: self._thread is None, timeout)

    def _is_old(self, number: str) -> bool:
        return number not in self.jobs or time.time() - self.answered > OLD_ANSWER_S

    def _note(self, number: str) -> str:
        """Return how old the answer is, if it is old, and why; "" if it is new."""
        now = time.time()
        if not (self.error or self._is_old(number)):
            return ""
        words = self.error or f"Slurm was asked {now - self.began:.0f} s ago and has not answered yet"
        if number in self.jobs:
            words += f"; its last answer is {now - self.answered:.0f} s old"
        return words

    def _ask_if_due(self, number: str) -> None:
        """Ask in a thread of its own, if it is time to and no question is open. Called with the lock."""
        is_new = number not in self.jobs and number not in self.asked_for
        if self._thread is None and (is_new or not 0 <= time.time() - self.began < SQUEUE_INTERVAL_S):
            self.began = time.time()
            self._thread = threading.Thread(target=self._ask, args=(self.began,), daemon=True)
            self._thread.start()

    def _ask(self, began: float) -> None:
        """Ask Slurm, and keep what it answers."""
        error, jobs = "Slurm's commands could not be called", self.jobs
        try:
            error, jobs = self._answer(began)
        finally:
            with self._asks:
                self.error = error
                if not error:
                    self.answered = began
                self.jobs = jobs
                self._thread = None
                self._asks.notify_all()

    def _answer(self, began: float) -> tuple[str, dict[str, Job]]:
        """Return why Slurm has not answered, or "", and all jobs as it knows them now or, without an answer, before."""
        columns = "--format=%i|%T|%r|%S|%N|%o"  # last, the script: a path may have a bar in it
        options = ("--noheader", "--array", "--states=all", columns, f"--user={self.user}")
        answer = ask_slurm("squeue", *options, cluster=self.cluster)
        with self._asks:
            self.asked_for, self.wanted = self.wanted, set()
        if not answer.yes:
            return f"squeue: {answer.reason.text}", self.jobs
        jobs = {number: Job(*values, asked=began) for number, *values in rows_of(answer.stdout, columns=6)}
        forgotten = sorted(self.asked_for - jobs.keys())
        if not forgotten:
            return "", jobs
        accounts = ask_slurm("sacct", *SACCT_OPTIONS, f"--jobs={','.join(forgotten)}", cluster=self.cluster)
        if accounts.returncode is None:  # other errors are those of a cluster that keeps no accounting
            known = {number: self.jobs[number] for number in forgotten if number in self.jobs}
            return f"sacct: {accounts.reason.text}", known | jobs
        jobs |= dict.fromkeys(forgotten, Job(asked=began))
        for number, words, start, nodes in rows_of(accounts.stdout, columns=4) if accounts.yes else ():
            state, _, reason = words.partition(" ")  # such as "CANCELLED by 1000"
            jobs[number] = Job(state, reason, start, nodes, asked=began, is_accounted=True)
        return "", jobs


known_queues: dict[tuple[int, str], Queue] = {}


def queue_of(user: int, cluster: str = "") -> Queue:
    """Return what this process knows of the jobs of a user, by its number, on a cluster."""
    return known_queues.setdefault((user, cluster), Queue(user, cluster))


def find_job(job: str, *, user: int) -> Job:
    """Return what Slurm says of a job of that user. Asks at most every SQUEUE_INTERVAL_S seconds."""
    return queue_of(user, cluster_of(job)).find(number_of(job))


def expect_jobs(jobs: Iterable[tuple[int, str]], *, timeout: float) -> None:
    """Ask once for all these jobs, each a user and a job, and wait for the answers at most `timeout` seconds."""
    numbers: dict[tuple[int, str], list[str]] = {}
    for user, job in jobs:
        numbers.setdefault((user, cluster_of(job)), []).append(number_of(job))
    end = time.monotonic() + timeout
    for place in numbers:
        queue_of(*place).expect(numbers[place])
    for place in numbers:
        queue_of(*place).wait(max(0.0, end - time.monotonic()))


def job_error(folder: Path, job: str) -> Reason:
    """Return why a job must not be touched for a run; an empty reason if its batch script lies in the run's folder.

    A folder may name any job of whoever cancels its run.
    """
    number, cluster = number_of(job), cluster_of(job)
    queue = queue_of(folder.stat().st_uid, cluster)
    queue.wait(limit_s("squeue"))  # a second question would not be answered sooner
    known = queue.jobs.get(number, Job())
    script = Path(known.script)  # a job keeps its script
    if not known.script:
        options = ("--noheader", "--array", "--states=all", "--format=%i|%o", f"--jobs={number}")
        answer = ask_slurm("squeue", *options, cluster=cluster)
        if not answer.yes:
            return answer.reason
        scripts = [cells[1] for cells in rows_of(answer.stdout, columns=2) if cells[0] == number]
        if not scripts and answer.stdout.strip():
            return Reason(f"squeue: its answer about job {number} cannot be read")
        if not scripts:
            return Reason(f"squeue: Invalid job id {number}", NO_SUCH_JOB)
        script = Path(scripts[-1])
    inner = script.parent  # FOLDER/logs; of an array, SWEEP/array_0, where a link of the task's number leads to FOLDER
    owner = inner.parent if inner.name == "logs" else inner / f"{int(number.partition('_')[2] or 0):03d}"
    try:
        if os.path.samefile(owner, folder) and (inner.name == "logs" or "_" in number):
            return Reason()
    except OSError:  # it is not there
        pass
    words = f"the folder names {job_words(job)}, whose batch script is {script}, so that job is not touched"
    return Reason(words, NOT_ITS_JOB, f"if it is yours, scancel {as_arguments(job)} ends it")


def job_of_script(script: Path, cluster: str = "") -> str | None:
    """Return the job of this user with this batch script; "" if Slurm knows none, None without an answer.

    cluster: one or several, separated by commas.
    """
    options = ("--noheader", "--states=all", "--format=%F|%o", f"--user={os.getuid()}")
    for name in cluster.split(","):
        answer = ask_slurm("squeue", *options, cluster=name)
        if not answer.yes:
            return None
        for number, path in rows_of(answer.stdout, columns=2):
            if path == str(script):
                return f"{number};{name}" if name else number
    return ""


def current_state(job: str) -> str | None:
    """Return Slurm's state of a job, asked for at this moment; "" if Slurm does not know it, None without an answer."""
    options = ("--noheader", "--states=all", "--format=%i|%T", f"--jobs={number_of(job)}")
    answer = ask_slurm("squeue", *options, cluster=cluster_of(job))
    if answer.none_yet:
        return None
    rows = rows_of(answer.stdout, columns=2)
    return rows[-1][1] if rows and answer.yes else ""


def rows_of(output: str, *, columns: int) -> list[list[str]]:
    """Return the cells of the lines that begin with a job's number; a site's wrapper may print banners, too."""
    rows = []
    for line in output.splitlines():
        cells = line.strip().split("|", columns - 1)
        if len(cells) == columns and cells[0][:1].isdigit():
            rows.append(["" if cell in ("None", "N/A", "(null)", "Unknown") else cell for cell in cells])
    return rows
