"""Run: a handle on a run folder, the same in the process that launched it and in any other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoint.steps import checkpoint_step, complete_checkpoints, drop_after
from ...own.modules import OwnSources
from ...params import ParamError, RunParams
from ...params.base import without_controls
from ...params.findings import Finding
from .files.folder import (
    PathLike,
    check_links,
    make_inner_folder,
    read_events,
    read_json,
    read_metrics,
    read_params_yaml,
    touch,
    write_json,
)
from .files.run_record import TRAIN, RunRecord, RunState, Status, check_entry, read_status
from .interrupt import interruptible
from .launchers.registry import check_no_replay, launcher_named, launcher_of
from .own_code import changes, code_of, read_code, read_versions, write_code
from .preempt import simulate_preemption
from .rank_count import with_ranks
from .slurm.slurm_state import job_number
from .start import prepared, start_in, warn
from .state import is_run, run_state
from .trust import check_trusted, trust_run
from .watch import read_log


def _tell_changes(tell: Callable[[Finding], object], words: str) -> None:
    """Warn that the own code, or a package that it imports, is not that of the launch; not without words."""
    if words:
        tell(Finding("warning", "own-code", f"the own code is not that of the launch: {words}"))


class Run:
    """A run, known by its folder alone; it holds nothing that another process could not know."""

    def __init__(self, path: PathLike):
        self.path = Path(os.path.expanduser(path)).absolute()

    @classmethod
    def open(cls, path: PathLike) -> Run:
        """Return a handle on an existing run. Raises ParamError naming the runs in the same folder if there is none."""
        run = cls(path)
        if is_run(run.path):
            return run
        parent = run.path.parent
        neighbors = sorted(path.name for path in parent.iterdir() if is_run(path)) if parent.is_dir() else []
        words = f"{str(run.path)!r} is not a run that you may read; {parent} holds {', '.join(neighbors) or 'none'}"
        raise ParamError("run", words)

    @property
    def name(self) -> str:
        """Name of the run: its folder's."""
        return self.path.name

    @property
    def params(self) -> RunParams:
        """Parameters of the run."""
        return RunParams.from_dict(read_params_yaml(self.path))

    @property
    def record(self) -> RunRecord | None:
        """Content of run.json; None if its launch was interrupted."""
        return RunRecord.read(self.path)

    @property
    def job(self) -> str | None:
        """Number of its Slurm job, once it is submitted, on another cluster such as 123;gpu; of a local run, submitit's
        name of it."""
        return job_number(self.path)

    def state(self) -> RunState:
        """Return its state now."""
        return run_state(self.path)

    def wait(self, timeout: float | None = None) -> RunState:
        """Wait until it is done, at most `timeout` seconds, and return its state then."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        with interruptible(f"the run {self.name} goes on; its cancel() ends it"):
            while True:
                state = self.state()
                if state.done or time.monotonic() > end:
                    return state
                time.sleep(0.1)

    def cancel(self, *, timeout: float = 10.0) -> RunState:
        """Stop all its processes and return its state once they are gone; a finished run is left as it is.

        Works from any machine that sees the folder, by asking the supervisor. Raises PermissionError if the run is
        another person's, TimeoutError if processes are left after `timeout` seconds, as on another machine. If Slurm
        was asked and has not answered by then, the state is not final and says so, and this process goes on asking. The
        run ends all the same as soon as its ranks or their watchdog see the file `cancel`.
        """
        end, state = time.monotonic() + timeout, self.state()
        is_unknown = self.record is None and job_number(self.path) and not read_status(self.path).done
        if state.done and not is_unknown:
            return state
        try:
            touch(self.path / "cancel")
        except PermissionError:
            owner = self.path.stat().st_uid
            words = f"{self.path} is the run of another user ({owner}), who alone can cancel it: Permission denied"
            raise PermissionError(words) from None
        record = self.record
        launcher = launcher_of(self.path, record) if record else launcher_named(self.params.launch.executor)
        waits_for, state = launcher.stop(self.path, self.state, end), self.state()
        return state if state.done or not waits_for else replace(state, notes=(*state.notes, waits_for))

    def delete(self) -> None:
        """Remove its folder, with its checkpoints. Raises ParamError while it goes on, OSError if files stay."""
        state = self.state()
        if not state.done:
            raise ParamError("run", f"{self.path} is {state}; cancel it before it is deleted")
        shutil.rmtree(self.path)  # refuses a link, and follows none

    def drill(self) -> None:
        """Preempt it as a cluster would: its ranks save, end and start again. Returns immediately.

        Raises ParamError if its ranks are not running.
        """
        simulate_preemption(self.path)

    def trust(self) -> Run:
        """Let this process run the own code that the folder holds now, whoever wrote it, and return the run.

        Of a run with own code, captions and an export run that code, too.
        """
        trust_run(self.path)
        return self

    def resume(
        self,
        *,
        step: int | None = None,
        params: RunParams | None = None,
        trust: bool = False,
        fresh_code: bool = False,
        tell: Callable[[Finding], object] = warn,
    ) -> Run:
        """Start it again where it ended, from its newest complete checkpoint or the one of `step`, and return.

        Args:
            step: The step of the checkpoint to go on from. Default: the newest complete one.
            params: Parameters in place of its own: more steps, other ranks, another strategy or backend, other
                freezing.
            trust: Run what its folder names, though somebody else may have written that.
            fresh_code: Run the own code as it is now, rather than as it was at the launch.
            tell: Called with each finding: of the plan, and what has changed in the own code. Default: a Python
                warning.

        Returns:
            This run, which may still be starting.

        Raises:
            ParamError: If it is still running or has done all its steps, or for a link out of its folder.
            UntrustedRun: Without `trust`, if somebody else may have written what its folder names. A ParamError, too.
        """
        check_no_replay(self.path, "resumed")
        check_links(self.path)
        # It goes on in its own folder, wherever that is now: the batch file deletes and writes files in there.
        place = {"launch.folder": str(self.path.parent), "launch.name": self.name}
        params = self.with_own_ranks(params or self.params).change(**place)
        if not trust:
            check_trusted(self.path, params)
        record, state, checkpoints = self.record, self.state(), self.path / "checkpoints"
        entry = check_entry(record.entry if record else TRAIN)
        if not state.done:
            raise ParamError("run", f"{self.path} is {state}; cancel it before it is resumed")
        newest = complete_checkpoints(checkpoints)[-1:]
        is_over = state.status is Status.COMPLETED
        if is_over and step is None and newest and checkpoint_step(newest[0]) >= params.train.steps:
            words = f"all {params.train.steps} of {self.path} are done; ask for more, or --step back"
            raise ParamError("train.steps", words)
        before = OwnSources(read_code(self.path), read_versions(self.path))
        with nullcontext() if fresh_code else code_of(self.path):
            _, plan, code = prepared(params, entry, tell)
        if not fresh_code:
            code = replace(code, files=code.files | before.files)
        if before.files:
            _tell_changes(tell, changes(before, code))
        if step is not None:
            drop_after(checkpoints, step)
        for name in ("logs", "captions", "profile"):
            if name == "logs" or os.path.lexists(self.path / name):
                make_inner_folder(self.path / name)  # refuses a link, which may lead anywhere
        for pattern in ("status.json", "cancel", "logs/rank*", "logs/*.pkl"):  # Slurm reuses job ids
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for path in (self.path / "logs").iterdir():
            if path.is_symlink():  # a log would be written through it
                path.unlink()
        write_code(self.path, code)
        if plan:
            write_json(self.path / "plan.json", plan)
        start_in(self.path, params, entry)
        return self

    def with_own_ranks(self, params: RunParams) -> RunParams:
        """Return parameters to resume with: the run keeps its number of ranks where they set none."""
        if params.launch.ranks is None:
            params = params.change(**{"launch.ranks": self.params.launch.ranks})
        return with_ranks(params)

    def logs(self, rank: int = 0, *, size: int = 1 << 20) -> str:
        """Return what a rank has printed so far: its newest `size` bytes, without control sequences."""
        return read_log(self.path, self._checked(rank), size=size)

    def metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return a rank's metrics so far, one row per step; of more than 256 MiB, the newest."""
        return read_metrics(self.path, self._checked(rank))

    def events(self) -> list[dict[str, Any]]:
        """Return what happened to it so far, oldest first: time, step, kind and text."""
        return read_events(self.path)

    def result(self) -> dict[str, Any] | None:
        """Return the content of result.json; None until it is written."""
        return read_json(self.path / "result.json")

    def _checked(self, rank: int) -> int:
        record = self.record
        if record and not 0 <= rank < record.ranks:
            raise ValueError(f"rank: {rank} is not a rank of {self.name}; they are 0 to {record.ranks - 1}")
        return rank

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return without_controls(f"<Run {self.path}: {self.state()}>")
