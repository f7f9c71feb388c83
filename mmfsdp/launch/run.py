"""Run: a handle on a run folder, the same in the process that launched it and in any other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runs import (
    PathLike,
    RunRecord,
    RunState,
    Status,
    is_run,
    queue,
    read_events,
    read_json,
    read_metrics,
    run_state,
    whose,
    write_json,
)
from ..runs.slurm import ENDS
from ..watch import read_log

if TYPE_CHECKING:
    from ..params import RunParams

GRACE = 2.0
"""Seconds that the ranks of a cancelled job have before they are killed: submitit ignores the first signal."""


class Run:
    """A run, known by its folder alone; it holds nothing that another process could not know."""

    def __init__(self, path: PathLike):
        self.path = Path(os.path.expanduser(path)).absolute()

    @classmethod
    def open(cls, path: PathLike) -> Run:
        """A handle on an existing run. Raises ParamError naming the runs beside it if there is none at `path`."""
        from ..params import ParamError

        run = cls(path)
        if not is_run(run.path):
            parent = run.path.parent
            for folder in (parent, run.path):
                if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
                    raise ParamError("run", f"{str(folder)!r} is closed{whose(folder, to_read=True)}")
            beside = sorted(p.name for p in parent.iterdir() if is_run(p)) if os.path.isdir(parent) else []
            raise ParamError("run", f"{str(run.path)!r} is not a run; {parent} holds {', '.join(beside) or 'none'}")
        return run

    @property
    def name(self) -> str:
        """Name of the run: its folder's."""
        return self.path.name

    @property
    def params(self) -> RunParams:
        """Its whole configuration."""
        from ..params import RunParams

        return RunParams.from_yaml(self.path / "params.yaml")

    @property
    def record(self) -> RunRecord | None:
        """Who runs it, and where; None if its launch was cut short."""
        return RunRecord.read(self.path)

    def own(self) -> Run:
        """This run, which one may change. Raises ParamError naming whose it is where one may not."""
        from ..params import ParamError

        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ParamError("run", f"{str(self.path)!r} is not yours to change{whose(self.path)}")
        return self

    def state(self) -> RunState:
        """How it is now."""
        return run_state(self.path)

    def wait(self, timeout: float | None = None) -> RunState:
        """Wait until it is done, at most `timeout` seconds, and return the state it is in then."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (state := self.state()).done and (until is None or time.monotonic() < until):
            time.sleep(0.1)
        return state

    def cancel(self, *, timeout: float | None = None) -> RunState:
        """Stop all its processes and return its state once they are gone; a finished run is left as it is.

        Works from any machine that sees the folder, by asking the supervisor. Raises ParamError if the run is another
        person's, TimeoutError if processes are left after `timeout` seconds (unset: 10; on Slurm 30), which can only be
        when they are on another machine.
        """
        if self.state().done:
            return self.state()
        (self.own().path / "cancel").touch()
        if (record := self.record) and record.executor == "slurm":
            return self._cancel_job(time.monotonic() + (timeout or 30))
        timeout = timeout or 10
        until = time.monotonic() + timeout
        while not self._gone():
            record = self.record
            if record and record.here and (not record.supervised() or time.monotonic() > until - 5):
                record.stop()  # nobody else does
            if time.monotonic() > until and not self._gone():
                raise TimeoutError(f"{self.name} still runs, {timeout:g} s after it was told to stop: {self.state()}")
            time.sleep(0.05)
        return self.state()

    def drill(self) -> None:
        """Preempt it as a cluster would, to see that it goes on: its ranks save, end and start again. Returns at once.

        Raises ParamError if it does not run.
        """
        from .drill import drill

        drill(self)

    def events(self) -> list[dict[str, Any]]:
        """What befell it so far, oldest first: time, step, kind and text."""
        return read_events(self.path)

    def resume(self, *, step: int | None = None, params: RunParams | None = None) -> Run:
        """Go on with it where it ended, from its newest complete checkpoint or that of `step`; returns at once.

        `params` replace its own: more steps, other ranks, another strategy or backend, other freezing. Raises
        ParamError if it still runs or has done all its steps.
        """
        from .start import resume

        return resume(self.path, step=step, params=params)

    def logs(self, rank: int = 0, *, size: int = 1 << 20) -> str:
        """What a rank has written so far: its newest `size` bytes, colors the only control sequences."""
        return read_log(self.path, self._checked(rank), size=size)

    def metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        """A rank's metrics so far, one row a step."""
        return read_metrics(self.path, self._checked(rank))[0]

    def result(self) -> dict[str, Any] | None:
        """result.json; None until it is written."""
        return read_json(self.path / "result.json")

    def _cancel_job(self, until: float) -> RunState:
        """By scancel where there is one; else the job itself notices, once it runs."""
        from .slurm import stop_job

        kill_at, complaint, number = float("inf"), "", None
        while not self.state().done:
            if number is None and (number := self.job):  # a submission that goes on stops the job itself
                complaint, kill_at = stop_job(number), time.monotonic() + GRACE
            elif number and time.monotonic() > kill_at:
                complaint, kill_at = stop_job(number, kill=True), float("inf")
            if number and queue.ask_now(number) in ENDS:
                verdict = {"job": number, "status": Status.CANCELLED, "reason": "cancelled", "finished": time.time()}
                write_json(self.path / "status.json", verdict)
            if time.monotonic() > until and not self.state().done:
                raise TimeoutError(f"{self.name} was told to stop and has not yet: {self.state()}. {complaint}")
            time.sleep(0.2)
        return self.state()

    @property
    def job(self) -> str | None:
        """Its Slurm job, once it is submitted."""
        number = (read_json(self.path / "status.json") or {}).get("job")
        return str(number) if number and self.record and self.record.executor == "slurm" else None

    def _gone(self) -> bool:
        record = self.record
        return self.state().done and not (record and record.here and record.members())

    def _checked(self, rank: int) -> int:
        record = self.record
        if record and not 0 <= rank < record.ranks:
            raise ValueError(f"rank: {rank} is not a rank of {self.name}; they are 0 to {record.ranks - 1}")
        return rank

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.state()}>"
