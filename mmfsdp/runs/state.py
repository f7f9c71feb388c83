"""Who runs a run (RunRecord) and how it is (RunState), worked out from its folder and its processes."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import psutil

from .files import NO_FILE, PathLike, is_full, metrics_path, read_json, read_metrics, write_json
from .processes import alive, members, stop

SILENCE = 180.0
"""Seconds without a sign of life after which a run on another machine is lost; clocks and caches differ."""

MOST = 2**20
"""No run has as many ranks: a larger number is damage, and would be looked through one by one."""

BIRTH = 10.0
"""Seconds that a launch may take to write run.json."""


class Status(str, Enum):
    """Where a run is in its life."""

    QUEUED = "QUEUED"
    """Launched; its ranks are not started yet."""
    STARTING = "STARTING"
    """Its ranks are started; no step is done yet."""
    RUNNING = "RUNNING"
    """It has done steps."""
    COMPLETED = "COMPLETED"
    """Every rank came to its end."""
    FAILED = "FAILED"
    """A rank failed, or the time was up."""
    CANCELLED = "CANCELLED"
    """Somebody stopped it."""
    LOST = "LOST"
    """Its processes are gone and left no result."""

    def __str__(self) -> str:
        return str(self.value)

    @property
    def done(self) -> bool:
        """True when nothing will change any more."""
        return self not in (Status.QUEUED, Status.STARTING, Status.RUNNING)


@dataclass(frozen=True)
class RunState:
    """A run at one moment."""

    status: Status
    reason: str = ""
    """Why, in words; empty where the status says all."""
    rank: int | None = None
    """The rank that failed first."""
    traceback: str = ""
    """That rank's traceback, or the last lines it wrote if it died without one."""
    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Optimizer steps asked for."""
    heartbeat: float | None = field(default=None, compare=False)
    """Seconds since rank 0 wrote its last metrics; None before the first."""

    @property
    def done(self) -> bool:
        """True when nothing will change any more."""
        return self.status.done

    @property
    def ok(self) -> bool:
        """True when it came to its end."""
        return self.status is Status.COMPLETED

    def __str__(self) -> str:
        return f"{self.status}, step {self.step} of {self.steps}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """run.json: who runs this, and where."""

    executor: str
    """What starts the ranks: local, slurm."""
    entry: str
    """The function that every rank calls with the run folder, as module:function."""
    ranks: int
    steps: int
    threads: int
    """CPU threads per rank; 0 for all that Slurm gives it."""
    timeout_min: int
    device: str
    host: str
    pid: int
    """The supervisor, which leads the session of all processes of the run; on Slurm, the process that submits."""
    start: float
    """When that process started, unix seconds."""
    identity: str
    """Value of MMFSDP_RUN in every process of the run."""
    created: float
    """Unix seconds."""
    version: str
    commit: str
    """Git commit of the folder that it was launched from; empty outside of git."""
    silence_s: float = 60.0
    """Seconds without a sign of life from a rank after which it is taken to hang."""
    nodes: int = 1

    def write(self, folder: Path) -> None:
        """Write run.json."""
        write_json(folder / "run.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Read run.json; None where it is missing or damaged."""
        values, hints = read_json(folder / "run.json") or {}, get_type_hints(cls)
        try:
            found = cls(**{f.name: hints[f.name](values[f.name]) for f in fields(cls) if f.name in values})
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        return found if 0 < found.ranks < MOST and 0 < found.pid < 2**31 and 0 < found.nodes < MOST else None

    @property
    def here(self) -> bool:
        """Whether its processes are on this machine, so that they can be looked at."""
        return self.host == socket.gethostname()

    def supervised(self) -> bool:
        """Whether its supervisor lives."""
        return alive(self.pid, self.start)

    def members(self) -> list[psutil.Process]:
        """Its living processes."""
        return members(self.pid, self.start, self.identity)

    def stop(self, *, grace: float = 2.0) -> bool:
        """Stop all its processes but the caller: TERM, then KILL. Whether all are gone."""
        return stop(self.pid, self.start, self.identity, grace=grace)


def is_run(folder: PathLike) -> bool:
    """Whether a folder is a run's, be it half-written; what is closed to this person is none."""
    return any(os.path.isfile(Path(folder) / name) for name in ("run.json", "params.yaml"))


def run_state(path: PathLike) -> RunState:
    """The state of a run, true in any process and after any crash. Never raises for what the folder holds."""
    folder = Path(path)
    record = RunRecord.read(folder)
    rows, _ = read_metrics(folder, offset=-20_000)
    step = rows[-1].get("step") if rows else 0
    values = _verdict(folder, record, stepped=bool(rows))
    return RunState(
        status=values["status"],
        reason=str(values.get("reason", "")),
        rank=values.get("rank"),
        traceback=str(values.get("traceback", "")),
        step=step if isinstance(step, int) else 0,
        steps=record.steps if record else 0,
        heartbeat=_age(metrics_path(folder)) if rows else None,
    )


def _verdict(folder: Path, record: RunRecord | None, *, stepped: bool) -> dict[str, Any]:
    if record is None:
        age = _age(folder)
        if age is not None and age < BIRTH:
            return {"status": Status.QUEUED, "reason": "being launched"}
        return {"status": Status.LOST, "reason": "it has no whole run.json: its launch was cut short"}
    if record.executor == "slurm":
        from .slurm import slurm_verdict

        return slurm_verdict(folder, record, stepped=stepped)
    supervised = not record.here or record.supervised()
    values = written(folder)  # after the look at the supervisor, which writes before it ends
    if values["status"].done:
        return values
    if values["status"] is Status.STARTING and stepped:
        values["status"] = Status.RUNNING
    if not record.here:
        ages = (_age(folder / name) for name in ("run.json", "status.json", "metrics.jsonl"))
        silent = min(age for age in ages if age is not None)
        if silent > SILENCE:
            return {"status": Status.LOST, "reason": f"no sign of life from {record.host} for {silent:.0f} s"}
        values.setdefault("reason", f"its processes are on {record.host} and cannot be seen from here")
    elif not supervised:
        return _orphaned(folder, record, values)
    if (folder / "cancel").exists():
        values["reason"] = "being cancelled"
    return values


def _orphaned(folder: Path, record: RunRecord, values: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a run whose supervisor died: what the ranks themselves have said."""
    if record.members():
        return values | {"reason": "its supervisor was killed; ranks go on without it"}
    words = [rank_word(folder, rank) for rank in range(record.ranks)]
    failed = [word for word in words if word.get("state") == "failed"]
    if (folder / "cancel").exists():
        return {"status": Status.CANCELLED, "reason": "cancelled"}
    if failed:
        first = min(failed, key=lambda word: word.get("time", 0))
        return {"status": Status.FAILED, **failure_of(folder, first)}
    if all(word.get("state") == "done" for word in words):
        return {"status": Status.COMPLETED}
    reason = "its processes are gone without a result: killed, or the machine stopped"
    return {"status": Status.LOST, "reason": reason + full_disk(folder)}


def written(folder: Path) -> dict[str, Any]:
    """status.json as it stands; what it lacks, or holds of no known status, counts as QUEUED."""
    values = read_json(folder / "status.json") or {}
    try:
        return values | {"status": Status(values.get("status", "QUEUED"))}
    except ValueError:
        return values | {"status": Status.QUEUED}


def rank_word(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank last said of itself: state (running, done, failed), pid, time, error, traceback; {} if nothing."""
    return read_json(folder / "logs" / f"rank{rank}.json") or {}


NO_MEMORY = "MemoryError|can't allocate memory|bad_alloc"
"""In what Python and torch say, on CPU and GPU, when memory is short."""
LESS_MEMORY = (
    "; to need less memory, lower train.batch_size and raise train.accumulation, or set fsdp.activation_checkpointing"
)


NO_ROOM = "No space left on device|Disk quota exceeded"
MORE_ROOM = "; make room, or name a folder elsewhere: launch.folder for runs, MMFSDP_CACHE for backbones"


def full_disk(folder: Path) -> str:
    """What a reason is followed by where a run's disk is full; else nothing."""
    return f"; the disk of {folder} is full{MORE_ROOM}" if is_full(folder) else ""


def advice(error: str, folder: Path | None = None) -> str:
    """What an error's words are followed by, where a person can do something; else nothing."""
    if re.search(NO_ROOM, error):
        return (full_disk(folder) if folder else "") or MORE_ROOM
    return LESS_MEMORY if re.search(NO_MEMORY, error) else ""


def failure_of(folder: Path, word: dict[str, Any]) -> dict[str, Any]:
    """The part of a verdict that names the failed rank."""
    rank, error = word.get("rank"), word.get("error", "failed")
    return {
        "rank": rank,
        "reason": f"rank {rank}: {error}{advice(error, folder)}",
        "traceback": word.get("traceback", ""),
    }


def log_paths(folder: PathLike) -> list[tuple[int, Path]]:
    """(rank, path) of every rank log, oldest job first."""
    found = []
    try:
        with os.scandir(Path(folder) / "logs") as entries:
            for entry in entries:
                if (match := re.fullmatch(r".+_(\d+)_log\.out", entry.name)) and entry.is_file():
                    found.append((entry.stat().st_mtime, int(match[1]), Path(entry.path)))
    except NO_FILE:
        return []
    return [(rank, path) for _, rank, path in sorted(found)]


def last_log_lines(folder: PathLike, rank: int, *, size: int = 4000) -> str:
    """The last `size` bytes that a rank has written, from a whole line on; empty if nothing."""
    paths = [path for number, path in log_paths(folder) if number == rank]
    if not paths:
        return ""
    with open(paths[-1], "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(start)
        text = file.read(size).decode("utf-8", "replace")
    return text.partition("\n")[2] if start and "\n" in text else text


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except NO_FILE:
        return None
