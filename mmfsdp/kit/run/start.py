"""Start a run: what is checked before, its folder, its record, and the process that takes care of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Protocol

import mmfsdp

from ...own.calls import load_own
from ...own.modules import OwnSources
from ...params import LaunchParams, ParamError, RunParams
from ...params.findings import Finding
from ...params.own import own_fields, path_of
from ...params.run import with_cluster
from .files.folder import make_folders, open_own, read_json, write_json, write_text
from .files.run_record import TRAININGS, RunRecord
from .hub_cache import check_cached
from .launchers.registry import launcher_for, launcher_named
from .local import FOLDER_VARIABLE, RUN_VARIABLE, file_age, process_start
from .own_code import read_code, sources_of, write_code
from .pretraining import pretrains
from .ranks.warm import start_in_warm
from .slurm.site import settled, time_limit
from .state import LAUNCH_TIMEOUT_S, SWEEP_FILE, is_run, run_state
from .trust import code_digest, params_digest, trust_run

if TYPE_CHECKING:
    from ...core.plan import WrapPlan

TRACK_LOG = "track.log"
"""The file in the run folder into which the process prints that tracks a run."""


NO_CODE = OwnSources()


class Prepared(Protocol):
    """A run that was checked and planned, as kit/train/prepare.py returns it."""

    @property
    def params(self) -> RunParams:
        """The parameters, with the number of ranks."""

    @property
    def plan(self) -> WrapPlan:
        """The plan, with all that a person should know among its findings."""

    @property
    def code(self) -> OwnSources:
        """The person's own code, as it was checked."""

    def to_dict(self) -> dict[str, Any]:
        """Return what plan.json holds."""


def prepared(
    params: RunParams | Prepared, entry: str, tell: Callable[[Finding], object]
) -> tuple[RunParams, dict[str, Any], OwnSources]:
    """Return the parameters to start with, what plan.json holds, and the own code.

    `tell` gets each finding of the plan. Prepares a run that is not prepared. One of a person's own entry is not
    planned: nobody knows what it trains. Nor is a job of Slurm, where this machine lacks what its nodes have. Raises
    ParamError as kit/train/prepare.py does.
    """
    if not isinstance(params, RunParams):
        return params.params, params.to_dict(), params.code
    if entry in TRAININGS:
        try:
            from ..train.prepare import prepare  # imports torch

            made: Prepared = prepare(params)
        except (OSError, ImportError) as error:
            if launcher_named(params.launch.executor).has_supervisor:
                raise
            tell(_not_planned(error))
            return settled(params), {}, sources_of(params)
        for finding in made.plan.lint:
            tell(finding)
        return made.params, made.to_dict(), made.code
    params = settled(params)
    check_place(params)
    for field, value in own_fields(params):
        load_own(field, value)
    if any(source.path or source.reader for source in params.data.sources().values()):  # the import takes seconds
        from ..data import open_sources

        open_sources(params.data, image_size=1)
    return params, {}, sources_of(params)


def _not_planned(error: Exception) -> Finding:
    """Return the warning of a job that is submitted from a machine that lacks what planning needs."""
    words = f"the plan and the data are not checked on this machine ({error}); the ranks check them when the job starts"
    return Finding("warning", "not-planned", words)


def warn(finding: Finding) -> None:
    """Give a warning of Python, at the line that calls `launch`, `sweep` or `Run.resume`; none for a note."""
    if finding.level != "note":
        warnings.warn(finding.message, stacklevel=4)


def check_place(params: RunParams) -> None:
    """Raise ParamError for what this machine, or its launcher, cannot do."""
    if params.train.trackers:
        from .trackers.track import check_trackers

        check_trackers(params.train.trackers)
    launcher_for(params).check(params)
    check_cached(params)


def start(
    params: RunParams,
    entry: str,
    plan: Mapping[str, Any] = MappingProxyType({}),
    code: OwnSources = NO_CODE,
    pretrain: bool | None = None,
) -> Path:
    """Make the folder of a run that was prepared, and start it in there.

    Args:
        params: The parameters of the run, as `prepared` returns them.
        entry: What every rank runs, by its name (run_record.py).
        plan: What plan.json holds; empty for a run that is not planned.
        code: What code/ holds: the person's own modules, and the versions of the packages that they import.
        pretrain: Whether its backbones may be missing. Default: that is looked up.

    Returns:
        The new run folder, whose supervisor has started.

    Raises:
        ParamError: If the name of the run is taken.
    """
    folder = make_folder(params.launch)
    try:
        write_code(folder, code)
        if plan:
            write_json(folder / "plan.json", plan)
        start_in(folder, params, entry, pretrain=pretrain)
    except Exception:
        shutil.rmtree(folder)  # no disk space, no process left: half a run would keep the name
        raise
    return folder


def make_folder(params: LaunchParams) -> Path:
    """Make a new run folder that its owner alone may open; with `replace`, rename a finished run of that name first."""
    parent = runs_folder(params)
    folder = parent / params.name
    if params.folder.startswith("~") and os.path.expanduser(params.folder) == params.folder:
        raise ParamError("launch.folder", f"{params.folder!r}: no such user; write it in full")
    try:
        make_folders(parent)
        if params.replace:
            _rename_finished(folder)
        _make_at_once(folder)
    except OSError as error:
        if os.path.lexists(folder):
            raise ParamError("launch.name", name_taken(folder)) from None
        raise ParamError("launch.folder", f"{str(parent)!r} cannot hold runs ({error}); choose another") from None
    return folder


def _make_at_once(folder: Path) -> None:
    """Make a folder with its logs/ in it, in one step. Raises FileExistsError if there is something of its name.

    Of several launches of one name at a time, the others see by logs/ that this one is a run.
    """
    if os.path.lexists(folder):
        raise FileExistsError(folder)
    unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    unfinished.mkdir(mode=0o700)
    (unfinished / "logs").mkdir(mode=0o755)
    try:
        unfinished.rename(folder)  # fails where there is a folder with something in it
    except OSError:
        shutil.rmtree(unfinished)
        raise


def _rename_finished(folder: Path) -> None:
    """Rename the folder of a run, or of a sweep, that has ended: NAME-1, NAME-2, ...

    Under a lock on one of its files: another launch may have just renamed it, and made a new run of its name.
    """
    for name in ("params.yaml", SWEEP_FILE):
        path = folder / name
        with suppress(FileNotFoundError, NotADirectoryError), _opened(path) as file:
            with suppress(OSError):  # a file server without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()) and _is_over(folder):
                number = 1
                while folder.with_name(f"{folder.name}-{number}").exists():
                    number += 1
                folder.rename(folder.with_name(f"{folder.name}-{number}"))
            return


def _opened(path: Path) -> IO[bytes]:
    """Open a file to lock it: for writing where that is allowed, since NFS refuses the lock of a reader."""
    return open_own(path, "r+b" if os.access(path, os.W_OK) else "rb")


def _is_over(folder: Path) -> bool:
    """Return True for the folder of a run that has ended, or of a sweep whose members all have."""
    if is_run(folder):
        return run_state(folder).done
    members = (read_json(folder / SWEEP_FILE) or {}).get("members", [])
    runs = [path for path in folder.glob("*/") if is_run(path)]
    return bool(members) and len(runs) == len(members) and all(run_state(path).done for path in runs)


def runs_folder(params: LaunchParams) -> Path:
    """Return the folder of the runs as an absolute path."""
    return Path(os.path.expanduser(params.folder)).absolute()


def free_name(folder: Path, name: str) -> str:
    """Return the first of NAME, NAME-2, NAME-3, ... that does not exist in a folder."""
    candidate, number = name, 1
    while os.path.lexists(folder / candidate):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def name_taken(folder: Path, with_what: str = "") -> str:
    """Return why a run cannot have the name of an existing folder. with_what: words about the run that has it."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{str(folder)!r} exists already, and you may not read it; choose another name"
    if not is_run(folder):
        age = file_age(folder)
        if (folder / "logs").is_dir() and age is not None and age < LAUNCH_TIMEOUT_S:
            return f"the run {str(folder)!r} is being launched by another process; choose another name"
        return f"{str(folder)!r} exists already and is not a run; choose another name"
    words = f"the run {str(folder)!r} exists already ({run_state(folder)})"
    if with_what:
        words += f" {with_what}"
    words += "; choose another name"
    return f"{words}, or once it has ended, set launch.replace to true, which renames it to {folder.name}-1"


def start_in(folder: Path, params: RunParams, entry: str, *, pretrain: bool | None = None) -> None:
    """Start the supervisor of a run, or on Slurm the process that submits it, in a session of its own.

    Args:
        folder: The run folder, which has all files of a launch but params.yaml and run.json. Those are written here.
        params: The parameters of the run.
        entry: What every rank runs, by its name (run_record.py).
        pretrain: As for `start`.
    """
    if pretrain is None:
        pretrain = pretrains(params, entry)
    write_text(folder / "params.yaml", params.to_yaml())
    identity = uuid.uuid4().hex
    environment = os.environ | {RUN_VARIABLE: identity, FOLDER_VARIABLE: str(folder)}
    pid = start_supervisor(folder, params, environment)
    record = make_record(params, entry, identity=identity, pid=pid, folder=folder)
    replace(record, pretrains=pretrain).write(folder)
    trust_run(folder)  # also where there is no key to show later who started it
    start_trackers(folder, params)


def start_supervisor(folder: Path, params: RunParams, environment: dict[str, str]) -> int:
    """Start the process that takes care of a run, by a warm process if one is there and fits. Return its pid."""
    log = folder / "logs" / "supervisor.log"
    if launcher_named(params.launch.executor).here:
        with open_own(log, "ab") as file:
            pid = start_in_warm([str(folder), "start"], log=file.fileno(), environment=environment)
        if pid is not None:
            return pid
    return start_detached(folder, "start", log=log, environment=environment).pid


def start_trackers(folder: Path, params: RunParams) -> None:
    """Start the process that hands the metrics of a run, or of a sweep's runs, to the trackers that it asks for."""
    if params.train.trackers:
        start_detached(folder, "track", *params.train.trackers, log=folder / TRACK_LOG)


def start_detached(
    folder: Path, role: str, *words: str, log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m mmfsdp.kit.run FOLDER ROLE WORDS` in a session of its own, which outlives this process.

    Args:
        folder: The run folder.
        role: What the process does, such as `start` or `track`; see kit/run/__main__.py.
        words: Further words of the command.
        log: The file that gets what it prints, on stdout and stderr.
        environment: Its environment variables. Default: those of this process.

    Returns:
        The process, which need not be waited for.
    """
    with open_own(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmfsdp.kit.run", str(folder), role, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # reap the child process if it ends first
    return process


def make_record(params: RunParams, entry: str, *, identity: str, pid: int, folder: Path) -> RunRecord:
    """Return the content of run.json for a run that process `pid` takes care of, in a folder that has its code/."""
    return RunRecord(
        executor=str(path_of(params.launch.executor)),
        entry=entry,
        ranks=params.launch.world_size,
        steps=params.train.steps,
        threads=launcher_named(params.launch.executor).threads(params.launch),
        timeout_min=_time_limit(params.launch),
        hang_timeout_s=params.launch.silence_s,
        device=params.train.device.value,
        host=socket.gethostname(),
        pid=pid,
        start=process_start(pid) or time.time(),
        identity=identity,
        created=time.time(),
        version=mmfsdp.__version__,
        commit=git_commit(),
        digest=params_digest(params.to_yaml()),
        code_digest=code_digest(params.to_yaml(), read_code(folder)),
    )


def _time_limit(launch: LaunchParams) -> int:
    """Return the time limit of a run in minutes. Of a profile that cannot be read, the process that submits tells."""
    try:
        return time_limit(with_cluster(launch))
    except ParamError:
        return time_limit(launch)


def git_commit() -> str:
    """Return the commit of the current folder; empty outside of git, and where git is not installed."""
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=2).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
