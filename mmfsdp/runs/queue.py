"""What Slurm says of jobs: one squeue (and sacct) for all runs and all processes of a person, at most every 10 seconds.

The answers are kept in a file of the person's own, which whoever finds them old renews. Nobody waits for Slurm but the
first who asks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..places import temporary_folder
from .files import read_json, write_json

EVERY = 10.0
"""Seconds between two calls of squeue."""
PATIENCE = 5.0
"""Seconds that one waits for an answer where there is none, or only a very old one."""
FORMAT = "%i|%T|%r|%S|%N"
NO_ACCOUNTING = 600.0
"""Seconds until sacct, having failed, is tried again."""

_refreshing = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A job at one moment, in Slurm's words."""

    state: str = ""
    """Such as PENDING, RUNNING or NODE_FAIL; empty where Slurm does not know the job."""
    reason: str = ""
    """Why it is in that state; empty for no reason."""
    start: str = ""
    """When it began or is expected to, local time; empty if unknown."""
    nodes: str = ""
    answered: float = 0.0
    """When Slurm said so, unix seconds; 0 if it was not asked for this job yet."""
    trouble: str = ""
    """Why Slurm does not answer now."""


def job(number: str, *, user: int) -> Job:
    """What Slurm says of a job of that user; at most about 10 seconds old while it answers at all."""
    try:
        path = _path(user)
    except OSError as error:
        return Job(trouble=str(error))
    answers = read_json(path) or {}
    if number not in answers.get("jobs", {}) and number not in answers.get("past", {}):
        (path.parent / f"{path.stem}.ask-{number}").touch()
    age = time.time() - answers.get("asked", 0.0)
    if not 0 <= age < EVERY:
        renewal = threading.Thread(target=_renew, args=(path, user), daemon=True, name="squeue")
        renewal.start()
        if not 0 <= time.time() - answers.get("answered", 0.0) < 3 * EVERY + PATIENCE:
            renewal.join(PATIENCE)
            answers = read_json(path) or {}
    known = answers.get("jobs", {}).get(number) or answers.get("past", {}).get(number) or {}
    asked = known or number in answers.get("unknown", ())
    return Job(**known, answered=answers.get("answered", 0.0) if asked else 0.0, trouble=answers.get("trouble", ""))


def ask_now(number: str) -> str:
    """A job's state, asked for this very moment; empty if Slurm does not know the job or does not answer."""
    done = _call("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={number}")
    return done.stdout.strip() if done.returncode == 0 else ""


def _path(user: int) -> Path:
    """The file with the answers, in a folder that nobody else can write."""
    which = "/".join(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))
    return temporary_folder() / f"squeue-{user}-{zlib.crc32(which.encode()):08x}.json"


def _renew(path: Path, user: int) -> None:
    """Ask Slurm anew, unless another thread or process does or just did."""
    if not _refreshing.acquire(blocking=False):
        with _refreshing:  # by another thread: its answer is mine
            return
    try:
        with FileLock(f"{path}.lock", timeout=PATIENCE):
            answers = read_json(path) or {}
            if 0 <= time.time() - answers.get("asked", 0.0) < EVERY:
                return
            answers["asked"] = time.time()
            write_json(path, answers)  # whatever becomes of this call, nobody calls again too soon
            write_json(path, _asked(answers, path, user))
    except Timeout:
        return  # another process waits for Slurm
    finally:
        _refreshing.release()


def _asked(answers: dict[str, Any], path: Path, user: int) -> dict[str, Any]:
    done = _call("squeue", "--noheader", "--array", "--states=all", f"--format={FORMAT}", f"--user={user}")
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        return answers | {"trouble": f"squeue: {words[0]}", "since": answers.get("since") or time.time()}
    jobs = {}
    for line in done.stdout.splitlines():
        number, state, reason, start, nodes = line.split("|")
        said = {"state": state, "reason": reason, "start": start, "nodes": nodes}
        jobs[number] = {k: "" if v in ("None", "N/A", "(null)") else v for k, v in said.items()}
    return {
        "asked": answers["asked"],
        "answered": time.time(),
        "jobs": jobs,
        **_past(answers, path, jobs),
    }


def _past(answers: dict[str, Any], path: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """What accounting says of the jobs that were asked for and that squeue knows no more; where there is accounting."""
    asks = {file.name.rpartition("-")[2]: file for file in path.parent.glob(f"{path.stem}.ask-*")}
    for file in asks.values():
        file.unlink(missing_ok=True)
    past, unaccounted = answers.get("past", {}), answers.get("unaccounted", 0.0)
    wanted = sorted(asks.keys() - jobs.keys() - past.keys())
    if wanted and time.time() - unaccounted > NO_ACCOUNTING:
        columns = "--format=JobID,State,Start,NodeList"
        done = _call("sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={','.join(wanted)}")
        if done.returncode:
            unaccounted = time.time()
        else:
            past = past | read_sacct(done.stdout)
    unknown = (asks.keys() | set(answers.get("unknown", ()))) - jobs.keys() - past.keys()
    return {"past": past, "unknown": sorted(unknown)[-1000:], "unaccounted": unaccounted}


def read_sacct(text: str) -> dict[str, dict[str, str]]:
    """Job -> what `sacct --parsable2 --format=JobID,State,Start,NodeList` says of it."""
    found = {}
    for line in text.splitlines():
        number, state, start, nodes = line.split("|")
        what, _, rest = state.partition(" ")  # "CANCELLED by 1000"
        found[number] = {"state": what, "reason": rest, "start": start, "nodes": nodes}
    return found


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; one that is missing or late fails, with words."""
    if not shutil.which(command[0]):
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed here")
    environment = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} did not answer within 30 s")
