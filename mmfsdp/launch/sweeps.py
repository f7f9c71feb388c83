"""sweep(): many runs that differ in a few parameters, a few at once, and one table of what came of them.

A sweep is a folder of ordinary runs, 000, 001 and on, beside base.yaml (what they share) and sweep.json (in what they
differ). A process of its own starts them in turn: closing the notebook or the terminal does not reach it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ..runs import PathLike, RunState, Status, is_run, read_json, run_state, write_json
from ..runs.listing import SWEEP, text_table
from ..runs.state import full_disk
from .lint import TRAINING, lint_here
from .run import Run
from .start import check as look
from .start import make_folder

if TYPE_CHECKING:
    from ..params import RunParams

ENTRY = TRAINING[1]
LOCK = ".queue.lock"
"""Held by the process that starts the members; free where there is none."""
MOST = 1000
"""Members of a sweep."""
Values = Mapping[str, Any]


def sweep(
    params: RunParams,
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    overrides: Sequence[Values] | None = None,
    at_once: int = 1,
    entry: str = ENTRY,
    check: Callable[[RunParams], None] | None = None,
) -> Sweep:
    """Start a run for every combination of the grid's values, with each of the overrides, and return at once.

    grid: values to try by dotted field name; overrides: combinations given one by one. at_once: how many run at a
    time. The sweep has params.launch's name and folder; its members are runs in it. Every member's parameters are
    checked before the first starts, and by `check`, too, which raises what is wrong. Raises ParamError.
    """
    from ..params.run import plain

    members = [dict(o) | g for o in overrides or [{}] for g in _combinations(grid or {})]
    checked = _checked(params, members, at_once)
    look(checked[0])
    linted = check is not None or entry not in TRAINING
    if check:
        for member in checked:
            check(member)
    elif not linted:
        linted = all([lint_here(member) for member in checked])  # every one of them, for its errors
    found = Sweep(_make_folder(params))
    params.to_yaml(found.path / "base.yaml")
    content = {"created": time.time(), "at_once": at_once, "entry": entry, "linted": linted}
    write_json(found.path / SWEEP, content | {"members": plain(members)})
    found._start()
    return found


class Sweep:
    """A sweep, known by its folder alone: any process can open it, see its table, stop it, run failed members again."""

    def __init__(self, path: PathLike):
        self.path = Path(os.path.expanduser(path)).absolute()

    @classmethod
    def open(cls, path: PathLike) -> Sweep:
        """A handle on an existing sweep. Raises ParamError if there is none at `path`."""
        from ..params import ParamError

        if not (Path(os.path.expanduser(path)) / SWEEP).is_file():
            raise ParamError("sweep", f"{str(path)!r} is not a sweep: it has no {SWEEP}")
        return cls(path)

    @property
    def members(self) -> dict[str, Values]:
        """In what each member differs from base.yaml, by its name."""
        return {f"{i:03d}": values for i, values in enumerate(self._read("members", []))}

    @property
    def shared(self) -> RunParams:
        """What the members share: base.yaml."""
        from ..params import RunParams

        return RunParams.from_yaml(self.path / "base.yaml")

    def params(self, name: str) -> RunParams:
        """The whole parameters of a member."""
        own = {"launch.folder": str(self.path), "launch.name": name}
        return self.shared.change(**self.members[name], **own)

    def run(self, name: str) -> Run:
        """A member that was started."""
        return Run.open(self.path / name)

    def states(self) -> dict[str, RunState]:
        """How each member is now."""
        queue = self._has_queue()
        return {name: self._state(name, queue=queue) for name in self.members}

    def done(self) -> bool:
        """Whether nothing more will happen by itself."""
        return not self._has_queue() and all(state.done for state in self.states().values())

    def wait(self, timeout: float | None = None) -> dict[str, RunState]:
        """Wait until all members are over, at most `timeout` seconds; their states then."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.done() and (until is None or time.monotonic() < until):
            time.sleep(0.3)
        return self.states()

    def cancel(self, *, timeout: float = 15.0) -> dict[str, RunState]:
        """Stop the members that run and start no more. Returns their states. Raises TimeoutError as Run.cancel does."""
        (self.path / "cancel").touch()
        try:
            with FileLock(self.path / LOCK, timeout=timeout):  # the queue has seen it, and is gone
                for mark in self.path.glob("*.again"):
                    mark.unlink()
        except Timeout:
            raise TimeoutError(f"the queue of {self.path} has not ended within {timeout:g} s") from None
        for name in self.members:
            if is_run(self.path / name) and not run_state(self.path / name).done:
                self.run(name).cancel(timeout=timeout)
        return self.states()

    def again(self, *names: str) -> list[str]:
        """Run members again that are over and did not complete: those named, or all; their names. Each goes on from its
        newest checkpoint. Raises ParamError for a name that is no such member."""
        from ..params import ParamError

        states = self.states()
        broken = [name for name, state in states.items() if state.done and not state.ok]
        if odd := set(names) - set(broken):
            raise ParamError("member", f"{min(odd)!r} is not one to run again; those are {', '.join(broken) or 'none'}")
        (self.path / "cancel").unlink(missing_ok=True)
        chosen = list(names) or broken
        for name in chosen:
            (self.path / f"{name}.again").touch()
        if chosen:
            self._start()
        return chosen

    def rows(self) -> list[dict[str, Any]]:
        """The table: name, the parameters in which members differ, state, step, loss, new pictures right, seconds."""
        from ..runs import last_row

        rows = []
        for (name, values), state in zip(self.members.items(), self.states().values(), strict=True):
            folder = self.path / name
            result, end = read_json(folder / "result.json") or {}, read_json(folder / "status.json") or {}
            began = (read_json(folder / "run.json") or {}).get("created", 0.0)
            row = {"name": name, **values, "state": str(state.status), "step": state.step}
            row |= {"loss": last_row(folder).get("loss"), "new right": result.get("heldout_exact_match")}
            rows.append(row | {"seconds": end["finished"] - began if "finished" in end else None, "why": state.reason})
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        varied = list(dict.fromkeys(key for values in self.members.values() for key in values))
        head = ["name", *varied, "state", "step", "loss", "new right", "seconds", "why"]
        return text_table([head, *([_cell(row.get(key)) for key in head] for row in rows)])

    def __fspath__(self) -> str:
        return str(self.path)

    def _read(self, key: str, default: Any) -> Any:
        return (read_json(self.path / SWEEP) or {}).get(key, default)

    def _state(self, name: str, *, queue: bool) -> RunState:
        folder = self.path / name
        if is_run(folder) and not (self.path / f"{name}.again").exists():
            return run_state(folder)
        if refused := read_json(self.path / f"{name}.refused"):
            return RunState(Status.FAILED, str(refused.get("reason", "")))
        if queue:
            return RunState(Status.QUEUED, "waits for its turn")
        ended = "cancelled" if (self.path / "cancel").exists() else "the queue was killed before its turn"
        return RunState(Status.CANCELLED if ended == "cancelled" else Status.LOST, ended + full_disk(self.path))

    def _has_queue(self) -> bool:
        try:
            with open(self.path / LOCK, "rb") as lock:  # for reading: it may be another person's sweep
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _start(self) -> None:
        """Start the process that starts the members; one that lives already goes on alone."""
        with open(self.path / "queue.log", "ab") as log:
            command = [sys.executable, "-m", "mmfsdp.launch.queue", str(self.path)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        threading.Thread(target=process.wait, daemon=True).start()  # buries it
        until = time.monotonic() + 10
        while not self._has_queue() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)


def _combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)[:80]


def _checked(params: RunParams, members: Sequence[Values], at_once: int) -> list[RunParams]:
    """Every member's parameters, all of them sound."""
    from ..params import ParamError

    if at_once < 1:
        raise ParamError("at_once", f"{at_once} is too few; it must be at least 1")
    if not 1 <= len(members) <= MOST:
        raise ParamError("sweep", f"makes {len(members)} runs; it may make 1 to {MOST}")
    found, array = [], params.launch.executor.value == "slurm"
    for values in members:
        if own := {"launch.name", "launch.folder", "launch.executor", "launch.replace"} & values.keys():
            raise ParamError(min(own), "is the same for all of a sweep; set it in the shared parameters")
        if array and (own := {key for key in values if key.startswith("launch.") or key == "train.device"}):
            raise ParamError(min(own), "is the same for all of a job array; set it in the shared parameters")
        try:
            found.append(params.change(**values))
        except ParamError as error:
            words = ", ".join(f"{key}={value}" for key, value in values.items())
            raise ParamError(error.field, f"{error.message} (in the member {words})") from None
        if found[-1] in found[:-1]:
            raise ParamError("sweep", f"two members are the same: {values}")
    return found


def _make_folder(params: RunParams) -> Path:
    """A new folder for the sweep, for its owner alone."""
    folder = make_folder(params.launch)
    (folder / "logs").rmdir()  # each member has its own
    return folder
