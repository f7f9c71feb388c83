"""Lines on Slurm's commands on the machine that `check` is called on: sbatch, squeue and sacct."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

from ..run.slurm.ask_slurm import ask_slurm
from ..verify.lines import NOTE, OK, WRONG, Line

NO_ACCOUNTING = "accounting storage is disabled"
"""Part of sacct's words on a cluster that keeps no accounting, which a run can do without."""
SLOW_LOGIN_S, LOGIN_TIMEOUT_S = 5.0, 30.0
"""Seconds of a login shell: more are too slow, and after the second nobody waits any longer."""
LOGIN_NODE = "run this on a login node of the cluster, or where its commands are on PATH (`module avail slurm`)"


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
