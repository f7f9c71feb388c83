"""A sweep on Slurm: its members as job arrays, each task of which runs the batch file of its member."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ....params.run import with_cluster
from ..files.folder import make_inner_folder, write_text
from ..files.run_record import RunState, Status, because, write_status
from ..own_code import write_code
from ..pretraining import pretrain_first
from ..start import make_folder, make_record
from ..sweep import MAX_MEMBERS, POLL_S, Sweep
from . import slurm
from .ask_slurm import Answer, ask_slurm
from .job_id import number_of, task_of
from .site import chosen_cluster
from .slurm_queue import job_of_script
from .slurm_state import SUBMIT_TIMEOUT_S

RETRY_S = 10.0
"""Seconds after which members that Slurm did not take are offered to it again."""
SUBMIT_LIMIT = re.compile(r"\w*Submit\w*Limit|\w*MaxSubmit\w*")
"""In sbatch's words: the limit on jobs in the queue, such as QOSMaxSubmitJobPerUserLimit or AssocGrpSubmitJobsLimit."""


def submit_array(members: Sweep) -> None:
    """Submit the members as a job array: each task runs the batch file of its member, as if submitted alone.

    More members than Slurm takes in an array make several, one after the other. Writes each member's job, or why it has
    none, into its status.json.
    """
    waiting = make_members(members)
    slurm.enter_job_environment(slurm.slurm_executor(members.params(waiting[0])))
    if members.content.get("pretrain"):
        pretrain_members(members, waiting)
    try:
        submit_in_parts(members, waiting)
    except Exception as error:
        for name in waiting:
            write_status(members.path / name, slurm.failed_submission(error), finished=time.time())
        raise


def make_members(members: Sweep) -> list[str]:
    """Make the run folders of all members, and return their names."""
    entry, names = members.content["entry"], []
    for name in members.members:
        params = members.params(name)
        folder = make_folder(params.launch)
        write_text(folder / "params.yaml", params.to_yaml())
        write_code(folder, members.code)
        record = make_record(params, entry, identity=uuid.uuid4().hex, pid=os.getpid(), folder=folder)
        replace(record, pretrains=members.content.get("pretrain", False)).write(folder)
        slurm.write_call(params, folder)
        names.append(name)
    return names


def pretrain_members(members: Sweep, waiting: list[str]) -> None:
    """Pretrain the backbones of the members before any is submitted. Those that this fails for leave `waiting`."""

    def sweep_cancelled() -> RunState | None:
        return cancelled(members, members.path)

    outcomes: dict[str, RunState | None] = {}  # by model: most members of a sweep have the same
    for name in [*waiting]:
        folder = members.path / name
        model = members.params(name).model.to_yaml()
        if model not in outcomes:
            outcomes[model] = pretrain_first(folder, sweep_cancelled)
        state = outcomes[model]
        if state is not None:
            write_status(folder, state, finished=time.time())
            waiting.remove(name)


def cancelled(members: Sweep, folder: Path) -> RunState | None:
    """Return the final state of a member that is cancelled, alone or with the whole sweep; None if it is not."""
    is_cancelled = (members.path / "cancel").exists() or (folder / "cancel").exists()
    return because(Status.CANCELLED, "cancelled") if is_cancelled else None


def submit_in_parts(members: Sweep, waiting: list[str]) -> None:
    """Submit job arrays until no member waits. Where Slurm takes no more jobs of this user now, wait and try again.

    A member is taken out of `waiting` once it has a job, is refused or is cancelled.
    """
    largest = size = largest_array(cluster_of_members(members))
    part, job = 0, ""
    while True:
        drop_cancelled(members, waiting)
        names = waiting[:size]
        if not names:
            return
        done = submit_part(members, part, names, after=job)
        submitted = slurm.submitted_job(done.stdout) if done.yes else ""
        if done.none_yet:
            submitted = late_job(members, waiting, part, done)
            if not submitted:
                continue  # Slurm has not taken them: offer them again
        if not submitted and job and "dependency" in done.stderr.lower():
            job = ""  # Slurm has forgotten the part before, which has ended
        elif not submitted and SUBMIT_LIMIT.search(done.stderr):
            size = len(names) // 2
            if size == 0:
                wait_for_turn(members, waiting, done.stderr)
                size = members.content["at_once"]
        else:
            for task, name in enumerate(names):
                if name not in waiting:  # cancelled meanwhile
                    continue
                if submitted:
                    slurm.accept_call(members.path / name, job=task_of(submitted, task))
                else:
                    refused = slurm.refusal(done.stderr, done.stdout)
                    write_status(members.path / name, refused, finished=time.time())
            waiting[:] = [name for name in waiting if name not in names]
            part, job, size = part + 1, submitted, largest


def submit_part(members: Sweep, part: int, names: Sequence[str], *, after: str) -> Answer:
    """Offer some members to Slurm as one job array, which starts when the job `after`, if any, has ended."""
    folder = members.path / f"array_{part}"
    if folder.exists():
        shutil.rmtree(folder)  # of a larger array, which Slurm did not take
    make_inner_folder(folder)
    for task, name in enumerate(names):  # each task finds its member by its own number
        (folder / f"{task:03d}").symlink_to(Path("..", name))
    write_text(folder / "array.sh", array_text(members, folder, names))
    dependency = [f"--dependency=afterany:{number_of(after)}"] if after else []  # no more at a time than was asked
    return ask_slurm(*slurm.SBATCH, *dependency, str(folder / "array.sh"), timeout=SUBMIT_TIMEOUT_S)


def late_job(members: Sweep, waiting: list[str], part: int, unanswered: Answer) -> str:
    """Return the job of an array for which sbatch did not answer; "" if Slurm says that it has not taken it."""
    words = f"Slurm was asked to take it, no answer yet ({unanswered.reason.text})"
    while True:
        wait_with_words(members, waiting, words)
        job = job_of_script(members.path / f"array_{part}" / "array.sh", cluster_of_members(members))
        if job is not None:
            return job


def cluster_of_members(members: Sweep) -> str:
    """Return the cluster to which the members are submitted, as `chosen_cluster` does."""
    return chosen_cluster(with_cluster(members.shared.launch))


def wait_for_turn(members: Sweep, waiting: list[str], refusal: str) -> None:
    """Wait until it is time to offer the members to Slurm again, and let each one's state say so."""
    limit = SUBMIT_LIMIT.search(refusal)
    words = f"waits for its turn: Slurm takes no more jobs of this user now ({limit[0] if limit else refusal})"
    wait_with_words(members, waiting, words)


def wait_with_words(members: Sweep, waiting: list[str], words: str) -> None:
    """Wait for RETRY_S, and let the state of each member that waits say for what."""
    for name in waiting:
        write_status(members.path / name, because(Status.QUEUED, words), submitted=time.time())
    end = time.monotonic() + RETRY_S
    while time.monotonic() < end and waiting:
        time.sleep(POLL_S)
        drop_cancelled(members, waiting)


def drop_cancelled(members: Sweep, waiting: list[str]) -> None:
    """Take the members that are cancelled, alone or with the whole sweep, out of `waiting`, and note their end."""
    for name in [*waiting]:
        if state := cancelled(members, members.path / name):
            write_status(members.path / name, state, finished=time.time())
            waiting.remove(name)


def largest_array(cluster: str = "") -> int:
    """Return how many tasks a job array may have on a cluster: their numbers must be below Slurm's MaxArraySize.

    1 where that is 0, without arrays: then sbatch refuses each member in its own words.
    """
    told = ask_slurm("scontrol", "show", "config", cluster=cluster).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1])) if found else MAX_MEMBERS


def array_text(members: Sweep, folder: Path, names: Sequence[str]) -> str:
    """Return the batch file of an array: the options that all members share, and a call of each one's own file."""
    lines = ["#!/bin/bash -l"]
    for line in slurm.sbatch_text(members.params(names[0])).splitlines():
        if line.startswith("#SBATCH") and not re.match("#SBATCH --(output|error|job-name)=", line):
            lines.append(line)
    log = shlex.quote(str(folder / "%3a/logs/%j_0_log.out"))
    batch = f'{shlex.quote(str(folder))}/"$(printf %03d "$SLURM_ARRAY_TASK_ID")"/logs/{slurm.BATCH_FILE}'
    lines += [
        f"#SBATCH --array=0-{len(names) - 1}%{members.content['at_once']}",
        f"#SBATCH --job-name={shlex.quote(members.path.name)}",
        f"#SBATCH --output={log}",
        f"exec bash -l {batch}",
    ]
    return "\n".join(lines) + "\n"
