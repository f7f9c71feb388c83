"""Run Slurm's commands. Each answers yes or no, or does not answer yet: that no answer came is never taken for a no.

At a large centre a squeue of 6 s is ordinary at noon. How long a command may take follows what its last calls took.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..files.reasons import NO_ANSWER, NO_SUCH_JOB, Reason
from .job_id import cluster_of, number_of

CLUSTERS = "CLUSTERS"
"""Behind SLURM_, and for sbatch behind SBATCH_: the variable by which commands choose a cluster, as option -M does."""

SHORTEST_LIMIT_S, LONGEST_LIMIT_S = 10.0, 60.0
"""Seconds that a command may take: within these, SLOWER times the longest of its last CALLS_KEPT calls."""
SLOWER, CALLS_KEPT = 3, 5
UNREACHED = ("unable to contact slurm", "socket timed out", "connection refused", "zero bytes were transmitted")
"""Parts of what Slurm's commands say, in lower case, where its controller does not answer them."""

last_calls_s: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=CALLS_KEPT))
"""Command -> what its last calls took; of one that did not answer, its limit."""


@dataclass(frozen=True)
class Answer:
    """The answer of a command of Slurm: yes, no, or nothing yet."""

    returncode: int | None
    """The exit code of the command; None if it did not end in time."""
    stdout: str = ""
    stderr: str = ""

    @property
    def yes(self) -> bool:
        """True if the command has done what it was called for."""
        return self.returncode == 0

    @property
    def no(self) -> bool:
        """True if Slurm has refused, or the command is missing here."""
        return not self.yes and not self.none_yet

    @property
    def none_yet(self) -> bool:
        """True if Slurm's controller has not answered the command: nobody knows whether it was done."""
        if self.returncode is None:
            return True
        words = self.stderr.lower()
        return not self.yes and any(part in words for part in UNREACHED)

    @property
    def reason(self) -> Reason:
        """Reason why it is no yes, in the command's last words, with a kind; empty for a yes."""
        if self.yes:
            return Reason()
        lines = self.stderr.strip().splitlines() or [f"it ended with exit code {self.returncode}"]
        if self.none_yet:
            return Reason(lines[-1], NO_ANSWER)
        return Reason(lines[-1], NO_SUCH_JOB if "Invalid job id" in self.stderr else "")


def limit_s(command: str) -> float:
    """Return how many seconds a command may take, by what its last calls took."""
    longest = max(last_calls_s[command], default=0.0)
    return min(LONGEST_LIMIT_S, max(SHORTEST_LIMIT_S, SLOWER * longest))


def ask_slurm(
    *command: str,
    cluster: str = "",
    timeout: float | None = None,
    text: str = "",
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run one of Slurm's commands, and return its answer.

    cluster: name of the one to ask; "" for the one whose commands are installed here, whatever SLURM_CLUSTERS says: a
    job is asked for where it was submitted to. timeout: seconds that it may take, in place of `limit_s`. text: what it
    reads. environment: instead of this process's.
    """
    if not shutil.which(command[0]):
        return Answer(127, "", f"{command[0]} is not installed here")
    environment = {**(os.environ if environment is None else environment), "SLURM_TIME_FORMAT": "standard"}
    environment.pop(f"SLURM_{CLUSTERS}", None)
    if cluster:
        command = (command[0], f"--clusters={cluster}", *command[1:])
    limit = limit_s(command[0]) if timeout is None else timeout
    began = time.monotonic()
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, timeout=limit)
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{command[0]} has not answered within {limit:.3g} s")
    except OSError as error:  # this machine can start no process now
        return Answer(None, "", f"{command[0]} cannot be called: {error}")
    finally:
        last_calls_s[command[0]].append(time.monotonic() - began)
    return Answer(done.returncode, done.stdout, done.stderr)


def scancel(*options: str, job: str) -> Reason:
    """End a job, or send it a signal, by scancel. Return why that failed; an empty reason if it did not."""
    answer = ask_slurm("scancel", *options, number_of(job), cluster=cluster_of(job))  # it may print a site's banner
    return answer.reason
