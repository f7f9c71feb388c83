"""sweep(): many runs that differ in a few parameters, a few at the same time, and one table of their results.

A sweep is a folder of ordinary runs, 000, 001 and on, with base.yaml (the parameters that they share) and sweep.json
(the parameters in which they differ). A process of its own starts them, so that closing the notebook does not stop it;
on Slurm it submits them as one job array.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...checkpoint.steps import best_of
from ...own.modules import OwnSources
from ...params import ParamError, RunParams
from ...params.base import plain
from ...params.enums import imported
from ...params.findings import Finding
from ...params.own import own_fields
from .files.folder import (
    LOSS_BYTES,
    LOSS_TITLE,
    NUMBER,
    PathLike,
    Types,
    best_words,
    final_loss,
    of_types,
    open_own,
    open_regular,
    read_json,
    read_result,
    touch,
    write_json,
    write_text,
)
from .files.run_record import TRAIN_AND_CAPTION, RunState, Status, because, check_entry, entry_named
from .files.snapshot import Snapshot
from .handle import Run
from .interrupt import interruptible
from .launchers.registry import launcher_named
from .own_code import read_code, read_versions, write_code
from .pretraining import pretrains
from .slurm.site import settled
from .start import make_folder, prepared, start, start_detached, start_trackers, warn
from .state import SWEEP_FILE, ask_ahead, is_run, run_state, text_table

LOCK = ".queue.lock"
"""Locked by the process that starts the members; free if there is none."""
LOG = "queue.log"
MAX_MEMBERS = 1000
MAX_CANCELS = 16
"""Members that are cancelled at the same time."""
POLL_S = 0.3
SWEEP_TYPES: Types = {"created": NUMBER, "at_once": int, "entry": str, "members": list, "pretrain": bool}
Values = Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]


def sweep(
    params: RunParams,
    *,
    grid: Grid,
    at_once: int = 1,
    entry: str = TRAIN_AND_CAPTION,
    tell: Callable[[Finding], object] = warn,
) -> Sweep:
    """Start a run for every combination of the grid's values, and return.

    All members are checked and planned before the first starts.

    Args:
        params: The parameters that the members share. The sweep has the name and folder of `params.launch`; its members
            are runs inside it.
        grid: Values to try by dotted field name, such as {"train.lr": [1e-4, 1e-3]}.
        at_once: Number of members that run at the same time.
        entry: The function that every rank of a member calls; see `launch`.
        tell: Called with each finding of the members' plans. Default: a Python warning.

    Returns:
        A handle on the sweep, whose members may still be starting.

    Raises:
        ParamError: If a member cannot be started, naming its field, or if the sweep's name is taken.
    """
    params = settled(params)  # the same for all members that vary no ranks
    members = sweep_members(params, grid)
    if at_once < 1:
        raise ParamError("at_once", f"{at_once} is too few; it must be at least 1")
    content: dict[str, Any] = {"created": time.time(), "at_once": at_once, "entry": check_entry(entry)}
    different = {}  # members with the same plan are prepared once
    for _, member in members:
        parts = (member.model, member.data, member.fsdp, member.launch.ranks, own_fields(member))
        different[repr(parts)] = member
    files: dict[str, bytes] = {}
    packages: dict[str, str] = {}
    for member in different.values():
        with interruptible("nothing was started"):
            code = prepared(member, entry, tell)[2]
        files |= code.files
        packages |= code.packages
        content["pretrain"] = content.get("pretrain") or pretrains(member, content["entry"])
    path = make_folder(params.launch)
    write_code(path, OwnSources(files, packages))  # each member has a copy: it may start hours from now
    (path / "logs").rmdir()  # each member has its own
    write_text(path / "base.yaml", params.to_yaml())
    write_json(path / SWEEP_FILE, content | {"members": plain([values for values, _ in members])})
    new_sweep = Sweep(path)
    process = start_detached(path, "sweep", log=path / LOG)
    end = time.monotonic() + 10
    while not new_sweep._has_starter() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    if launcher_named(params.launch.executor).array:  # else each member starts its own
        start_trackers(path, params)
    return new_sweep


def sweep_members(params: RunParams, grid: Grid) -> list[tuple[Values, RunParams]]:
    """Return the changed fields and the parameters of each run that `sweep` would start.

    Raises ParamError for the first mistake.
    """
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not 1 <= len(combinations) <= MAX_MEMBERS:
        raise ParamError("sweep", f"makes {len(combinations)} runs; it may make 1 to {MAX_MEMBERS}")
    members: list[tuple[Values, RunParams]] = []
    is_array = bool(launcher_named(params.launch.executor).array)
    for changes in combinations:
        for key in sorted(changes):
            of_job = is_array and (key.startswith("launch.") or key == "train.device")
            if of_job or key in ("launch.name", "launch.folder", "launch.executor", "launch.replace"):
                whole = "a job array" if is_array else "a sweep"
                raise ParamError(key, f"is the same for all of {whole}; set it in the shared parameters")
        try:
            member = params.change(**changes)
        except ParamError as error:
            words = ", ".join(f"{key}={value}" for key, value in changes.items())
            raise ParamError(error.field, f"{error.message} (in the member {words})") from None
        members.append((changes, member))
    return members


class Sweep:
    """A sweep, known by its folder alone: any process can open it, print its table and cancel it."""

    def __init__(self, path: PathLike):
        self.path = Path(os.path.expanduser(path)).absolute()
        self.content: dict[str, Any] = of_types(read_json(self.path / SWEEP_FILE) or {}, SWEEP_TYPES)
        self.content["entry"] = entry_named(self.content.get("entry", ""))
        """created, at_once, entry, members, and pretrain: whether backbones of members were missing at the launch."""
        self.members: dict[str, Values] = {}
        """Name of each member -> the parameters in which it differs from base.yaml."""
        for number, values in enumerate(self.content.get("members", [])[:MAX_MEMBERS]):
            self.members[f"{number:03d}"] = values if isinstance(values, dict) else {}

    @classmethod
    def open(cls, path: PathLike) -> Sweep:
        """Return a handle on an existing sweep. Raises ParamError if there is none at `path`."""
        if not (Path(os.path.expanduser(path)) / SWEEP_FILE).is_file():
            raise ParamError("sweep", f"{str(path)!r} is not a sweep: it has no {SWEEP_FILE}")
        return cls(path)

    @property
    def code(self) -> OwnSources:
        """The own code of the members, as it was when the sweep was started."""
        return OwnSources(read_code(self.path), read_versions(self.path))

    @property
    def shared(self) -> RunParams:
        """The parameters that the members share: base.yaml."""
        return RunParams.from_yaml(self.path / "base.yaml")

    def params(self, name: str) -> RunParams:
        """Return the parameters of a member."""
        place = {"launch.folder": str(self.path), "launch.name": name}
        return self.shared.change(**{**self.members[name], **place})

    def run(self, name: str) -> Run:
        """Return a member that was started."""
        return Run.open(self.path / name)

    def states(self) -> dict[str, RunState]:
        """Return the state of each member."""
        if self._has_starter():
            not_started = because(Status.QUEUED, "waits for its turn")
        elif (self.path / "cancel").exists():
            not_started = because(Status.CANCELLED, "cancelled")
        else:
            reason = f"the process that starts the members has ended before its turn; see {self.path / LOG}"
            not_started = because(Status.LOST, reason)
        ask_ahead(self.path / name for name in self.members)
        states = {}
        for name in self.members:
            states[name] = run_state(self.path / name) if is_run(self.path / name) else not_started
        return states

    def done(self) -> bool:
        """Return True if nothing more will happen by itself."""
        return not self._has_starter() and all(state.done for state in self.states().values())

    def wait(self, timeout: float | None = None) -> dict[str, RunState]:
        """Wait until all members are done, at most `timeout` seconds. Return their states."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        with interruptible(f"the sweep {self.path.name} goes on; its cancel() ends it"):
            while not self.done() and time.monotonic() < end:
                time.sleep(POLL_S)
        return self.states()

    def cancel(self, *, timeout: float = 10.0) -> dict[str, RunState]:
        """Stop the members that run and start no more. Return their states. Raises TimeoutError as Run.cancel does."""
        end = time.monotonic() + timeout
        touch(self.path / "cancel")
        try:
            open_own(self.path / LOCK, "ab").close()  # refuses a link, which the lock would follow
            with FileLock(self.path / LOCK, timeout=timeout):  # the starter has seen the file and has ended
                started = [name for name in self.members if self._is_member(name)]
        except Timeout:
            raise TimeoutError(f"the starter of {self.path} has not ended within {timeout:g} s") from None
        running = [name for name in started if not run_state(self.path / name).done]

        cancelled: dict[str, RunState] = {}

        def cancel_member(name: str) -> str:
            try:
                cancelled[name] = self.run(name).cancel(timeout=max(0.0, end - time.monotonic()))
            except TimeoutError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(MAX_CANCELS) as pool:
            late = [error for error in pool.map(cancel_member, running) if error]
        if late:
            raise TimeoutError(f"{len(late)} of {len(running)} members: {late[0]}")
        return self.states() | cancelled

    def rows(self) -> list[dict[str, Any]]:
        """Return the table: name, the varied parameters, state, step, loss, new pictures right, seconds, reason.

        The best stands first: most new pictures right, then least loss (`final_loss`). Members whose loss is not finite
        stand last.
        """
        states, rows = self.states(), []
        for name, values in self.members.items():
            folder, state = self.path / name, states[name]
            look = Snapshot(folder, last_bytes=LOSS_BYTES)
            result, record, status = read_result(folder), look.record, look.values
            row = {"name": name, **values, "state": str(state.status), "step": state.step}
            row |= {"loss": final_loss(look.rows()), "new right": result.get("heldout_exact_match")}
            row["seconds"] = status["finished"] - record.created if record and "finished" in status else None
            best = best_words(best_of(folder / "checkpoints"))
            if best:  # of `train.keep_best`
                row["best"] = best
            rows.append(row | {"why": state.reason})
        return sorted(rows, key=lambda row: (states[row["name"]].not_finite, *_place(row)))

    def __str__(self) -> str:
        varied: dict[str, None] = {}
        for values in self.members.values():
            varied |= dict.fromkeys(values)
        rows = self.rows()
        scores = ["best"] if any("best" in row for row in rows) else []
        head = ["name", *varied, "state", "step", "loss", "new right", *scores, "seconds", "why"]
        lines = [[LOSS_TITLE if key == "loss" else key for key in head]]
        for row in rows:
            lines.append([_cell(row.get(key)) for key in head])
        return text_table(lines)

    def _is_member(self, name: str) -> bool:
        """Return True if a member was started. A link may lead to a run that is of no sweep."""
        return is_run(self.path / name) and not (self.path / name).is_symlink()

    def _has_starter(self) -> bool:
        """Return True if a process is there that starts the members."""
        try:
            with open_regular(self.path / LOCK) as lock:  # for reading: it may be another person's sweep
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def _place(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return what a member is sorted by, the least first; what is not known counts as worst."""
    right, loss = row["new right"], row["loss"]
    finite = isinstance(loss, int | float) and math.isfinite(loss)
    return (1.0 if right is None else -right), (loss if finite else math.inf)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def run_sweep(folder: Path) -> None:
    """Start the members of a sweep, no more at a time than `at_once`, until all have ended or it is cancelled."""
    members = Sweep.open(folder)
    with FileLock(folder / LOCK, timeout=5):  # held as long as members may start
        if array := launcher_named(members.shared.launch.executor).array:
            imported(array)(members)
            return
        while not (folder / "cancel").exists():
            waiting = [name for name in members.members if not is_run(folder / name)]
            started = [folder / name for name in members.members if name not in waiting]
            running = [path for path in started if not run_state(path).done]
            if not waiting and not running:
                return
            free = max(0, members.content["at_once"] - len(running))
            for name in waiting[:free]:
                may_pretrain = members.content.get("pretrain", False)  # each looks again
                start(members.params(name), members.content["entry"], code=members.code, pretrain=may_pretrain)
            time.sleep(POLL_S)
