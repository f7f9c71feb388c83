"""The records of a run: who runs it (run.json), its state (status.json), and what each rank reports."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ....params import ParamError
from ....params.base import without_controls
from ....params.enums import Choice, Executor
from ....params.own import PATH
from .folder import NUMBER, Row, Types, of_types, read_json, write_json
from .history import STATE, add_moment
from .reasons import CANCELLING, Reason

TRAIN, TRAIN_AND_CAPTION, SITE_CHECK = "train", "train_and_caption", "check"
TRAININGS = (TRAIN, TRAIN_AND_CAPTION)
ENTRIES = {
    TRAIN: "mmfsdp.kit.train:run",
    TRAIN_AND_CAPTION: "mmfsdp.kit.train.evaluate:train_and_caption",
    SITE_CHECK: "mmfsdp.kit.check.rank_facts:write_facts",
}
"""Name of an entry -> the function that ranks call. run.json has the name: whoever resumes another person's folder must
not import what that person has written there, and a run can be resumed after a function has moved."""
_NAMED = {
    "mmfsdp.train:run": TRAIN,
    "mmfsdp.train.evaluate:train_and_caption": TRAIN_AND_CAPTION,
    "mmfsdp.site_check.rank_facts:write_facts": SITE_CHECK,
}
"""The function that run.json had before entries had names -> its entry."""

REPLAY = "replay"
"""The executor of a run folder that a player writes from a recording: it has no ranks (player.py)."""
MAX_RANKS = 100_000
"""Ranks that a run may have: a reader looks for a file of each."""
MAX_PID = 2**31
JOB_NUMBER = re.compile("[0-9]{1,18}(_[0-9]{1,9})?(;[A-Za-z][A-Za-z0-9_.-]{0,99})?")
"""A Slurm job, or a task of a job array, and maybe its cluster: slurm/job_id.py."""
MAX_REASON, MAX_TRACEBACK = 4000, 100_000
"""Characters of why a run or a rank has ended, and of a traceback, that are read."""

ENTRIES_VARIABLE = "MMFSDP_ENTRIES"
"""Environment variable with further modules of entries, separated by commas: for tests."""


class Status(Choice):
    """The phase that a run is in."""

    QUEUED = "QUEUED"
    """Launched; its ranks are not started yet."""
    PREPARING = "PREPARING"
    """Its small backbones are pretrained, once for all runs; its ranks are not started yet."""
    STARTING = "STARTING"
    """Its ranks are started; no step is done yet."""
    RUNNING = "RUNNING"
    """It has done steps."""
    SUSPENDED = "SUSPENDED"
    """Slurm has stopped its ranks for a while; they keep their memory."""
    COMPLETED = "COMPLETED"
    """Every rank finished."""
    FAILED = "FAILED"
    """A rank failed, or the time limit was reached."""
    CANCELLED = "CANCELLED"
    """Somebody stopped it."""
    LOST = "LOST"
    """Its processes are gone and left no result."""

    @property
    def done(self) -> bool:
        """True if the status is final."""
        return self not in (Status.QUEUED, Status.PREPARING, Status.STARTING, Status.RUNNING, Status.SUSPENDED)


@dataclass(frozen=True)
class RunState:
    """The state of a run at one moment."""

    status: Status
    why: Reason = Reason()
    """The reason of the state; empty where the status says all."""
    traceback: str = ""
    """That of the rank that failed first, or its last log lines if it died without one."""
    notes: tuple[str, ...] = ()
    """Other findings of a look, such as that Slurm does not answer. They are in no file."""
    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Optimizer steps in total."""
    not_finite: bool = False
    """The loss of the last step is not finite, or the last steps were skipped: their gradient was not finite."""
    replay_of: str = ""
    """Of a replay, what its recording was made on; empty for a run."""

    @property
    def done(self) -> bool:
        """True if the state is final."""
        return self.status.done

    @property
    def ok(self) -> bool:
        """True if the run completed, and its training did not diverge."""
        return self.status is Status.COMPLETED and not self.not_finite

    @property
    def reason(self) -> str:
        """The reason of the state, in words for people."""
        return "; ".join(filter(None, (str(self.why), *self.notes)))

    @property
    def rank(self) -> int | None:
        """The rank that failed first."""
        return self.why.rank

    def __str__(self) -> str:
        reason = without_controls(self.reason)
        if reason and self.status is Status.COMPLETED and self.step == self.steps:
            words = f"{self.status}, {reason}"
        else:
            words = f"{self.status}, step {self.step} of {self.steps}" + (f": {reason}" if reason else "")
        return f"{words} [{replay_words(self.replay_of)}]" if self.replay_of else words


def because(
    status: Status,
    text: str,
    *,
    kind: str = "",
    fix: str = "",
    rank: int | None = None,
    others: tuple[Reason, ...] = (),
    traceback: str = "",
) -> RunState:
    """Return the state of a run and why it is in it. The arguments are those of `Reason`."""
    return RunState(status, Reason(text, kind, fix, rank, others), traceback)


def replay_words(replay_of: str) -> str:
    """Return that a run is a replay, and what its recording was made on."""
    return f"replay of a recording: {without_controls(replay_of)}"


BEING_CANCELLED = Reason("being cancelled", CANCELLING)
"""Of a state in which the ranks are being stopped because somebody has asked for it."""

STATUS_TYPES: Types = {
    "status": str,
    "reason": str,
    "rank": int,
    "traceback": str,
    "kind": str,
    "cause": str,
    "fix": str,
    "others": list,
    "job": (str, int),
    "submitted": NUMBER,
    "finished": NUMBER,
    "alive": NUMBER,
}


STATE_KEYS = ("status", "reason", "rank", "traceback", "kind", "cause", "fix", "others")
"""Keys of a state in status.json: its reason as data, and the sentence of it for people."""
REASON_TYPES: Types = {"cause": str, "kind": str, "fix": str, "rank": int}
MAX_OTHERS = 8
"""Reasons of other ranks that are read."""


def status_values(folder: Path) -> Row:
    """Return what status.json holds, each value of its type; {} if it is missing or damaged."""
    return _shortened(of_types(read_json(folder / "status.json") or {}, STATUS_TYPES))


def _shortened(values: Row) -> Row:
    """Return the values with texts that are not too long: they are shown in a line."""
    for key in ("reason", "cause", "fix", "kind", "error"):
        if key in values:
            values[key] = values[key][:MAX_REASON]
    if "traceback" in values:
        values["traceback"] = values["traceback"][-MAX_TRACEBACK:]  # its end names the error
    return values


def read_status(folder: Path) -> RunState:
    """Return what status.json says; QUEUED if it is missing or damaged."""
    return state_of_values(status_values(folder))


def state_of_values(values: Row) -> RunState:
    """Return the state that some values of STATE_KEYS are of; QUEUED if they name no status."""
    try:
        status = Status(values.get("status", "QUEUED"))
    except ValueError:
        status = Status.QUEUED
    others = []
    for other in values.get("others", ())[:MAX_OTHERS]:
        if isinstance(other, dict):
            others.append(_reason_of_values(_shortened(of_types(other, REASON_TYPES))))
    why = _reason_of_values(values | {"cause": values.get("cause") or values.get("reason", "")})
    return RunState(status, replace(why, others=tuple(others)), values.get("traceback", ""))


def _reason_of_values(values: Row) -> Reason:
    return Reason(values.get("cause", ""), values.get("kind", ""), values.get("fix", ""), values.get("rank"))


def values_of_state(state: RunState) -> Row:
    """Return a state as status.json holds it, by STATE_KEYS."""
    others = [_values_of_reason(other) for other in state.why.others]
    values = {"status": state.status, "reason": str(state.why), "traceback": state.traceback, "others": others}
    return values | _values_of_reason(state.why)


def _values_of_reason(why: Reason) -> Row:
    return {"cause": why.text, "kind": why.kind, "fix": why.fix, "rank": why.rank}


def write_status(folder: Path, state: RunState, **more: Any) -> None:
    """Write a state, and more (job, submitted, finished), into status.json; what else it holds is kept.

    Another state than the one there is a moment of the run's history.
    """
    before, values = status_values(folder), values_of_state(state)
    write_json(folder / "status.json", before | values | more)
    if state_of_values(before) != state_of_values(values):
        add_moment(folder, STATE, {key: value for key, value in values.items() if value not in (None, "", [])})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json: who runs this, and where."""

    executor: str
    """Launcher of the ranks: local, slurm, srun, or an import path; or replay, which has none."""
    entry: str
    """The function that every rank calls with the run folder: a name of ENTRIES."""
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
    """Time when that process started, in unix seconds."""
    identity: str
    """Value of MMFSDP_RUN in every process of the run."""
    created: float
    """Unix seconds."""
    version: str
    commit: str = ""
    """Git commit of the folder that it was launched from; empty outside of git."""
    hang_timeout_s: float = 60.0
    """Seconds without a heartbeat after which a rank counts as hung."""
    digest: str = ""
    """Shows whose parameters these are: see trust.py. Empty in folders of others."""
    code_digest: str = ""
    """Digest of the own code in code/; empty without any."""
    pretrains: bool = False
    """Its backbones are pretrained before its ranks start (pretraining.py)."""
    replay_of: str = ""
    """Of a replay, what its recording was made on."""

    def write(self, folder: Path) -> None:
        """Write run.json."""
        write_json(folder / "run.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Return the content of run.json; None if it is missing, damaged, or of no run that can be."""
        return cls.of_values(read_json(folder / "run.json") or {})

    @classmethod
    def of_values(cls, values: Row) -> RunRecord | None:
        """Return the record with these values; None where one is missing or of another type, or of no run that can be.

        Values of other names are left out.
        """
        kinds: Types = {"str": str, "int": int, "float": NUMBER, "bool": bool}
        types = {f.name: kinds[str(f.type)] for f in fields(cls)}
        known = of_types({name: value for name, value in values.items() if name in types}, types)
        known = {name: value[:MAX_REASON] if isinstance(value, str) else value for name, value in known.items()}
        known["entry"] = entry_named(known.get("entry", ""))
        try:
            record = cls(**known)
        except TypeError:  # a field is missing, or its value is of another type
            return None
        can_be = names_launcher(record.executor) and 1 <= record.ranks <= MAX_RANKS and 1 <= record.pid < MAX_PID
        return record if can_be else None


def names_launcher(name: str) -> bool:
    """Return True for the name of a launcher of this package, and for the import path of another one."""
    return name in (*Executor, REPLAY) or PATH.fullmatch(name) is not None


def entry_named(entry: str) -> str:
    """Return the name of an entry that a record names, maybe by its function, as earlier records do."""
    return _NAMED.get(entry, entry)


def check_entry(entry: str) -> str:
    """Return the name of an entry. Raises ParamError for one that is not in ENTRIES."""
    entry = entry_named(entry)
    module = entry.partition(":")[0]
    if entry in ENTRIES or (module and module in os.environ.get(ENTRIES_VARIABLE, "").split(",")):
        return entry
    raise ParamError("entry", f"{entry!r} is not an entry of mmfsdp; it must be {TRAIN} or {TRAIN_AND_CAPTION}")


def function_of(entry: str) -> str:
    """Return the function of an entry as module:function. Raises ParamError for one that is not in ENTRIES."""
    return ENTRIES.get(check_entry(entry), entry)


RANK_TYPES: Types = {
    "state": str,
    "rank": int,
    "host": str,
    "pid": int,
    "start": NUMBER,
    "time": NUMBER,
    "step": int,
    "error": str,
    "kind": str,
    "traceback": str,
}


def rank_status(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a rank last reported: state (running, preempted, failed, done), pid, time and so on; {} if it
    has not reported."""
    return _shortened(of_types(read_json(folder / "logs" / f"rank{rank}.json") or {}, RANK_TYPES))


def rank_statuses(folder: Path, record: RunRecord) -> list[dict[str, Any]]:
    """Return what each rank last reported, in order of the ranks."""
    return [rank_status(folder, rank) for rank in range(record.ranks)]


def first_failure(statuses: list[dict[str, Any]]) -> RunState | None:
    """Return the FAILED state of the rank that failed first, the likely cause; None if no rank reported a failure."""
    failed = [status for status in statuses if status.get("state") == "failed"]
    if not failed:
        return None
    first = min(failed, key=lambda status: status.get("time", 0.0))
    rank = first.get("rank")
    cause = f"rank {rank}: {first.get('error', 'failed')}"
    traceback = first.get("traceback", "")
    return because(Status.FAILED, cause, kind=first.get("kind", ""), rank=rank, traceback=traceback)


def failed_first(died: RunState | None, reported: RunState | None) -> RunState | None:
    """Return the state of the rank that failed first, of one that died without a report and one that reported an error.

    The one that died is blamed: the other failed because of it, often before its exit was seen.
    """
    if died is None or reported is None:
        return died or reported
    return replace(died, why=replace(died.why, others=(reported.why,)))


def all_done(statuses: list[dict[str, Any]]) -> bool:
    """Return True if every rank reported that it finished."""
    return all(status.get("state") == "done" for status in statuses)


def cancelled_state(folder: Path, record: RunRecord | None, reason: str = "cancelled") -> RunState:
    """Return the final state of a run that was stopped: COMPLETED if its training had ended, else CANCELLED."""
    result, start = folder / "result.json", folder / "params.yaml"
    started = record.created if record else float("inf")
    if record and start.is_file():  # both times are the file server's, whose clock may differ
        started = start.stat().st_mtime
    if result.is_file() and result.stat().st_mtime > started:  # rank 0 writes it after the last step is saved
        return because(Status.COMPLETED, f"{reason} after the last step")
    return because(Status.CANCELLED, reason)
