"""The state of a run that is a Slurm job: first from the files of its ranks, then from what Slurm says."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from . import queue
from .files import NO_FILE, write_json
from .state import RunRecord, Status, failure_of, last_log_lines, rank_word, written

END = "ranks.end"
"""File in logs/: the exit code of all ranks together, written by the job on its first node."""
FAILED = "ranks.failed"
"""File in logs/: some rank has failed, as its own word says."""
PREEMPTED = "ranks.preempted"
"""File in logs/: the ranks have saved and made room; the job is to be queued again."""
LIFE = "SLURM_RESTART_COUNT"
"""Environment variable of a job: how often it was started before; missing the first time."""
NODE_FAILED = "srun: error: Node failure on "
BORN = 60.0
"""Seconds that a submission may take."""
UNSEEN = 30.0
"""Seconds after which Slurm should know of a job that it was given."""

WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDS = {
    "TIMEOUT": "its time was up; raise launch.timeout_min",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "it needed more memory than it was given; raise launch.mem",
    "PREEMPTED": "it was preempted",
    "FAILED": "",
    "COMPLETED": "",
    "CANCELLED": "cancelled from outside, by scancel or the cluster's managers",
    "REVOKED": "it was given to another cluster",
}
"""Final state of a job -> what became of the run; nothing where the ranks' own words say more."""

HINTS = {
    "TimeLimit": "launch.timeout_min", "NodeLimit": "launch.nodes", "QOS": "launch.qos", "Assoc": "launch.account",
    "Account": "launch.account", "Constraints": "launch.constraint", "Reservation": "launch.reservation",
    "PartitionConfig": "launch.partition, launch.nodes or launch.gpus_per_node", "Partition": "launch.partition",
}  # fmt: skip
"""In Slurm's reason why a job waits -> the field that it is about."""


def slurm_verdict(folder: Path, record: RunRecord, *, stepped: bool) -> dict[str, Any]:
    """The content of status.json as it should be now; a final one is written there by whoever finds it."""
    submitting = record.supervised() if record.here else time.time() - record.created < BORN
    values = written(folder)
    if values["status"].done and not _again(folder, values):
        return values
    job = values.get("job")
    if job is None:
        return _unsubmitted(folder, record, submitting)
    verdict = _of_files(folder, record) or _of_slurm(folder, record, str(job), stepped=stepped)
    if (folder / "cancel").exists():
        if verdict["status"].done and verdict["status"] is not Status.COMPLETED:
            verdict = {"status": Status.CANCELLED, "reason": "cancelled"}
        elif not verdict["status"].done:
            verdict["reason"] = "being cancelled"
    verdict = values | {"reason": "", "job": job} | verdict
    if verdict["status"].done:
        _keep(folder, verdict)
    return verdict


def _again(folder: Path, values: dict[str, Any]) -> bool:
    """Whether the job was started once more after it had ended."""
    word = rank_word(folder, 0)
    return word.get("state") == "running" and word.get("time", 0.0) > values.get("finished", float("inf"))


def _unsubmitted(folder: Path, record: RunRecord, submitting: bool) -> dict[str, Any]:
    if submitting:
        return {"status": Status.QUEUED, "reason": "being submitted"}
    if (folder / "cancel").exists():
        return {"status": Status.CANCELLED, "reason": "cancelled"}
    return {"status": Status.LOST, "reason": f"its submission from {record.host} was cut short"}


def _of_files(folder: Path, record: RunRecord) -> dict[str, Any] | None:
    """The verdict on a run that has ended by itself, from what its ranks have written."""
    code = _end(folder)
    if code is None:
        return None
    if (folder / "logs" / PREEMPTED).exists():
        return {"status": Status.FAILED, "reason": "its ranks made room, but could not queue it again; resume it"}
    if code == 0 and all(rank_word(folder, rank).get("state") != "preempted" for rank in range(record.ranks)):
        return {"status": Status.COMPLETED}
    first = _first_failed(folder, record)
    if not first or NODE_FAILED in last_log_lines(folder, 0, size=40_000):
        return None  # a job that has lost a node, Slurm starts again
    return {"status": Status.FAILED, **failure_of(folder, first)}


def _end(folder: Path) -> int | None:
    try:
        return int((folder / "logs" / END).read_text())
    except (*NO_FILE, ValueError):
        return None


def _first_failed(folder: Path, record: RunRecord) -> dict[str, Any] | None:
    if not (folder / "logs" / FAILED).exists():
        return None
    words = (rank_word(folder, rank) for rank in range(record.ranks))
    return min((w for w in words if w.get("state") == "failed"), key=lambda word: word.get("time", 0), default=None)


def _of_slurm(folder: Path, record: RunRecord, number: str, *, stepped: bool) -> dict[str, Any]:
    job = queue.job(number, user=folder.stat().st_uid)
    word = rank_word(folder, 0)
    ended = _end(folder) is not None
    said = f"; {job.trouble}, and so this is what was known {_ago(job.answered)}" if job.trouble else ""
    if job.state in ENDS:
        return _over(folder, record, number, job.state, job.reason)
    if job.state in WAITS and word.get("time", 0.0) < job.answered:
        return {"status": Status.QUEUED, "reason": f"job {number} waits{_waiting(job)}{said}"}
    if (folder / "logs" / PREEMPTED).exists():
        return {"status": Status.QUEUED, "reason": f"job {number}: its ranks made room, and it is queued again"}
    if ended and job.answered > (folder / "logs" / END).stat().st_mtime + 2 and not job.state:
        return _over(folder, record, number, "FAILED", "")
    since = max((folder / "status.json").stat().st_mtime, word.get("time", 0.0))
    if not job.state and not job.trouble and job.answered > since + UNSEEN:
        return _over(folder, record, number, "", "")
    if job.state or word or ended or job.trouble:
        status = Status.RUNNING if stepped else Status.STARTING if job.state or word else Status.QUEUED
        first = _first_failed(folder, record)
        failure = failure_of(folder, first) if first else {}
        reason = failure.get("reason") or f"job {number}" + (f" on {job.nodes}" if job.nodes else "")
        return {"status": status, **failure, "reason": reason + said}
    return {"status": Status.QUEUED, "reason": f"job {number} was submitted{said}"}


def _waiting(job: queue.Job) -> str:
    """Why a job waits and until when, such as ` (Resources), expected to start at 14:05`."""
    if not job.reason and not job.start:
        return ""
    hint = next((field for part, field in HINTS.items() if part in job.reason), "")
    text = f" ({job.reason})" if job.reason else ""
    text += f"; look at {hint}" if hint else ""
    if job.start:
        start = datetime.fromisoformat(job.start)
        form = "%H:%M" if start.date() == datetime.now().date() else "%Y-%m-%d %H:%M"
        text += f", expected to start at {start.strftime(form)}"
    return text


def _over(folder: Path, record: RunRecord, number: str, state: str, reason: str) -> dict[str, Any]:
    """The verdict on a job that is over, or that Slurm knows no more (state "")."""
    words = [rank_word(folder, rank) for rank in range(record.ranks)]
    if all(word.get("state") == "done" for word in words):
        return {"status": Status.COMPLETED}
    if state == "CANCELLED":
        return {"status": Status.CANCELLED, "reason": ENDS[state] + (f" ({reason})" if reason else "")}
    if first := _first_failed(folder, record):
        return {"status": Status.FAILED, **failure_of(folder, first)}
    if not state:
        return {"status": Status.LOST, "reason": f"Slurm knows job {number} no more, and it left no result"}
    if ENDS[state]:
        return {"status": Status.FAILED, "reason": ENDS[state]}
    return _died(folder, words, reason)


_TASK = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_BLIND = re.compile(r"error: .*(?:[Cc]ould not open std\w+ file|Could not chdir|IO setup failed).*")


def _died(folder: Path, words: list[dict[str, Any]], reason: str) -> dict[str, Any]:
    """The verdict on ranks that left no word of their end: what srun has said of them."""
    log = last_log_lines(folder, 0, size=40_000)
    blind = _BLIND.search(log)
    if blind or (not log and re.search("LaunchFail|:53", reason)):  # the batch job's own output cannot be opened
        said = f" ({blind[0] if blind else reason})"
        absent = [rank for rank, word in enumerate(words) if not word]
        return {
            "status": Status.FAILED,
            "rank": absent[0] if absent else None,
            "reason": f"a node cannot see {folder}{said}; put launch.folder where all nodes can write",
            "traceback": log[-4000:],
        }
    for node, ranks, how in _TASK.findall(log):
        rank = int(re.split(r"[,-]", ranks)[0])
        how += "" if words[rank] else " before it began"
        text = last_log_lines(folder, rank)
        return {"status": Status.FAILED, "rank": rank, "reason": f"rank {rank} on {node}: {how}", "traceback": text}
    last = log.strip().splitlines()[-1:] or [f"no rank has left a word{f' ({reason})' if reason else ''}"]
    return {"status": Status.FAILED, "reason": last[0][:500], "traceback": log[-4000:]}


def _keep(folder: Path, verdict: dict[str, Any]) -> None:
    """Leave the end in the folder: Slurm forgets it."""
    try:
        write_json(folder / "status.json", verdict | {"finished": time.time()})
    except OSError:
        return  # somebody else's run, or a full disk: whoever comes next works it out again


def _ago(then: float) -> str:
    return f"{time.time() - then:.0f} s ago" if then else "from its files"
