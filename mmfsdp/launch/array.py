"""A sweep as one Slurm job array: every task runs the batch file of one member, as if it had been submitted alone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from submitit.core.utils import DelayedSubmission

from ..runs import Status, is_run, reserve, write_json, write_text
from .job import run_rank
from .lint import mistake
from .slurm import enter_clean_environment, refusal, sbatch_text
from .start import make_folder, reopen, write_record

if TYPE_CHECKING:
    from .sweeps import Sweep

PICKLE, BATCH = "member_submitted.pkl", "member.sh"


def submit_array(sweep: Sweep, names: Sequence[str]) -> None:
    """Submit members together, no more than the sweep's number at once. What sbatch says, good or bad, is then in the
    status.json of each; or what the lint says of one that nobody has linted."""
    enter_clean_environment()
    for name in names:
        _prepare(sweep, name)
    if not sweep._read("linted", False):
        wrong = {name: words for name in names if (words := mistake(sweep.params(name)))}
        for name, words in wrong.items():
            _refuse(sweep, name, words)
        names = [name for name in names if name not in wrong]
    if not names:
        return
    path = sweep.path / "array.sh"
    write_text(path, array_text(sweep, names))
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        for name in names:
            _refuse(sweep, name, refusal(done.stderr))
        return
    number = done.stdout.strip().partition(";")[0]
    for name in names:
        job, logs = f"{number}_{int(name)}", sweep.path / name / "logs"
        (logs / PICKLE).rename(logs / f"{job}_submitted.pkl")
        write_json(logs.parent / "status.json", {"status": Status.QUEUED, "job": job, "submitted": time.time()})


def _refuse(sweep: Sweep, name: str, words: str) -> None:
    refused = {"status": Status.FAILED, "reason": words, "finished": time.time()}
    write_json(sweep.path / name / "status.json", refused)


def array_text(sweep: Sweep, names: Sequence[str]) -> str:
    """What sbatch receives: the options of the first member, which are those of all, and a line that calls each's own
    batch file."""
    options = [line for line in sbatch_text(sweep.params(names[0])).splitlines() if line.startswith("#SBATCH")]
    options = [line for line in options if not re.match("#SBATCH --(output|error|job-name)=", line)]
    tasks = ",".join(str(int(name)) for name in names)
    log = shlex.quote(str(sweep.path / "%3a/logs/%j_0_log.out"))
    batch = f'{shlex.quote(str(sweep.path))}/"$(printf %03d "$SLURM_ARRAY_TASK_ID")"/logs/{BATCH}'
    options += [
        f"#SBATCH --array={tasks}%{sweep._read('at_once', 1)}",
        f"#SBATCH --job-name={shlex.quote(sweep.path.name)}",
        f"#SBATCH --output={log}",
    ]
    return "\n".join(["#!/bin/bash", *options, f"exec bash {batch}", ""])


def _prepare(sweep: Sweep, name: str) -> None:
    """The member's folder, ready for its task."""
    folder, params = sweep.path / name, sweep.params(name)
    entry = reopen(folder, step=None, params=params) if is_run(folder) else sweep._read("entry", "")
    if not folder.exists():
        make_folder(params.launch)
    for mark in sweep.path.glob(f"{name}.*"):
        mark.unlink()
    logs = folder / "logs"
    reserve(folder)
    write_text(folder / "params.yaml", params.to_yaml())
    write_text(logs / BATCH, sbatch_text(params))
    call = DelayedSubmission(run_rank, str(folder))
    call.set_timeout(params.launch.timeout_min, 1)
    call.dump(logs / PICKLE)
    write_record(folder, params, entry, identity=uuid.uuid4().hex, pid=os.getpid())
