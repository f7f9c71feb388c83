"""launch(): a run folder, a supervisor, and back to the caller at once."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import mmfsdp

from ..runs import RunRecord, complete_checkpoints, drop_after, is_run, refused, reserve, run_state, whose, write_text
from ..runs.checkpoints import checkpoint_step
from ..runs.processes import RUN_VARIABLE, process_start
from ..runs.state import MORE_ROOM
from .lint import TRAINING, lint_here
from .run import Run

if TYPE_CHECKING:  # the supervisor and the ranks start sooner without
    from ..params import LaunchParams, RunParams

ENTRY = TRAINING[0]
"""What every rank calls, with the run folder."""


def launch(params: RunParams, *, entry: str = ENTRY, linted: bool = False) -> Run:
    """Start a run and return at once. Its ranks outlive the caller: interrupt, restart and death.

    `entry` ("module:function") is called with the run folder on every rank, the torch.distributed variables set.
    linted: its plan has been looked at.
    Raises ParamError if the run's name is taken, the lint finds errors in its plan, or Slurm refuses it at once. Where
    planning is not imported yet the lint comes before the ranks, in the background, and refuses in the run's state.
    """
    check(params)
    unseen = entry in TRAINING and not (linted or lint_here(params))  # what else ranks may call is not known here
    folder = make_folder(params.launch)
    try:
        reserve(folder)
    except OSError as error:
        shutil.rmtree(folder)
        raise _no_room(folder, error) from None
    return _begin(folder, params, entry, unseen=unseen)


def resume(folder: Path, *, step: int | None = None, params: RunParams | None = None) -> Run:
    """Go on with a run that ended before its last step, in its folder, and return at once.

    The ranks take up the newest complete checkpoint, or that of `step`; newer ones are put aside. `params` replace
    the run's own. Raises ParamError if the run goes on by itself, is complete, or is being resumed by another.
    """
    run = Run.open(folder).own()
    changed, params = params is not None, params or run.params
    check(params)
    unseen = changed and not lint_here(params)  # what has run is not asked again
    try:
        reserve(folder)  # before anything is changed: what cannot go on now can be resumed later
    except OSError as error:
        raise _no_room(folder, error) from None
    return _begin(folder, params, reopen(folder, step=step, params=params), unseen=unseen)


def reopen(folder: Path, *, step: int | None, params: RunParams) -> str:
    """Make the folder of a run that is over ready for its going on; the entry function to go on with."""
    from ..params import ParamError

    run, checkpoints = Run.open(folder), folder / "checkpoints"
    state, record = run.state(), run.record
    if not state.done:
        raise ParamError("run", f"{folder} is {state}; cancel it before it is resumed")
    newest = complete_checkpoints(checkpoints)[-1:]
    if state.ok and step is None and newest and checkpoint_step(newest[0]) >= params.train.steps:
        raise ParamError("train.steps", f"all {params.train.steps} of {folder} are done; ask for more, or --step back")
    if step is not None:
        try:
            drop_after(checkpoints, step)
        except ValueError as error:
            raise ParamError("step", str(error).removeprefix("step: ")) from None
    try:
        (folder / "run.json").rename(folder / "logs" / f"run-{time.time():.3f}.json")  # one of two wins
    except FileNotFoundError:
        raise ParamError("run", f"{folder} is being resumed by another process, or was never launched") from None
    for pattern in ("status.json", "cancel", "drill", "logs/rank*", "logs/*.pkl"):  # job ids come round again
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    return record.entry if record else ENTRY


def check(params: RunParams) -> None:
    """Raises ParamError for what can be known to fail."""
    if params.launch.executor.value == "local":
        return params.fsdp.check_machine()
    from .slurm import check as ask

    ask(params)


def _begin(folder: Path, params: RunParams, entry: str, *, unseen: bool) -> Run:
    """Start the supervisor of a folder that holds no live run; on Slurm, the process that submits it."""
    write_text(folder / "params.yaml", params.to_yaml())
    identity = uuid.uuid4().hex
    write_record(folder, params, entry, identity=identity, pid=_detach(folder, identity, unseen).pid)
    return Run(folder)


def write_record(folder: Path, params: RunParams, entry: str, *, identity: str, pid: int) -> None:
    """run.json: the run is in the care of process `pid` from now on."""
    local, started = params.launch.executor.value == "local", process_start(pid)
    RunRecord(
        executor=params.launch.executor.value,
        entry=entry,
        ranks=params.launch.ranks,
        steps=params.train.steps,
        nodes=params.launch.nodes,
        threads=params.launch.threads or (max(1, _cores() // params.launch.ranks) if local else 0),
        timeout_min=params.launch.timeout_min,
        silence_s=params.launch.silence_s,
        device=params.train.device.value,
        host=socket.gethostname(),
        pid=pid,
        start=time.time() if started is None else started,
        identity=identity,
        created=time.time(),
        version=mmfsdp.__version__,
        commit=_commit(),
    ).write(folder)


def make_folder(params: LaunchParams) -> Path:
    """A new run folder for its owner alone; a finished run of that name is first renamed if `replace` says so."""
    from ..params import ParamError

    parent = Path(os.path.expanduser(params.folder)).absolute()
    folder = parent / params.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if params.replace and os.path.exists(folder):
            _set_aside(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        if os.path.exists(folder):
            raise ParamError("launch.name", _taken(folder, params)) from None
        raise ParamError(
            "launch.folder", f"{str(parent)!r} cannot hold runs ({error}); choose another{refused(error)}"
        ) from None
    (folder / "logs").mkdir()
    return folder


def _no_room(folder: Path, error: OSError) -> Exception:
    from ..params import ParamError

    return ParamError("launch.folder", f"{str(folder)!r} cannot be written ({error}){refused(error) or MORE_ROOM}")


def _taken(folder: Path, params: LaunchParams) -> str:
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{str(folder)!r} exists already and is not yours; choose another name{whose(folder)}"
    if not is_run(folder):
        return f"{str(folder)!r} exists already and is not a run; choose another name"
    state = run_state(folder)
    if not state.done:
        return f"the run {str(folder)!r} is {state}; choose another name, or cancel it first"
    return (
        f"the run {str(folder)!r} exists already ({state}); choose another name, or set launch.replace to true, "
        f"which renames the old one to {params.name}-1"
    )


def _set_aside(folder: Path) -> None:
    """Rename a finished run of one's own to name-1, or the first such name that is free."""
    if not os.access(folder, os.W_OK | os.X_OK) or not is_run(folder) or not run_state(folder).done:
        return  # then making the folder fails, and says why
    number = 1
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(other)


def _detach(folder: Path, identity: str, unseen: bool) -> subprocess.Popen[bytes]:
    with open(folder / "logs" / "supervisor.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmfsdp.launch", str(folder), *(["unseen"] if unseen else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {RUN_VARIABLE: identity},
        )
    threading.Thread(target=process.wait, daemon=True).start()  # buries it, should it end before we do
    return process


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
