"""The registry of launchers: `launch.executor` -> who starts the ranks. None is imported before it is needed.

A launcher of somebody's own code runs in the process that launches, in the processes of its run, and where this user
may run what the run folder holds (trust.py). Elsewhere a run is known by its files alone.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....own.calls import OwnCodeError, call_own
from ....params import Executor, ParamError, RunParams
from ....params.enums import imported
from ....params.launching import SLURM_FIELDS, LaunchParams
from ....params.own import OwnCode, path_of
from ..files.folder import read_params_yaml
from ..files.run_record import REPLAY, RunRecord, replay_words
from ..own_code import use_code_of
from ..trust import own_code_of, was_told_to_trust

if TYPE_CHECKING:
    from .launcher import Launcher

FIELD = "launch.executor"
INTERFACE = "mmfsdp.kit.run.launchers.launcher:Launcher"
FILES_ALONE = "mmfsdp.kit.run.launchers.files_alone:FilesAlone"
LAUNCHERS = {**{each.value: each.code for each in Executor}, REPLAY: "mmfsdp.kit.run.launchers.replay_launcher:Replay"}
"""Name of a launcher -> import path of its class."""

_own: dict[Path, tuple[Any, Launcher]] = {}
"""Run folder -> what decides which launcher it has here, and that launcher."""


@cache
def _entry(path: str) -> Any:
    return imported(path)()


def launcher_named(executor: OwnCode) -> Launcher:
    """Return the launcher of this name; for own code, which is not run, one that knows a run by its files alone."""
    launcher: Launcher = _entry(LAUNCHERS.get(path_of(executor), FILES_ALONE))
    return launcher


def launcher_for(params: RunParams) -> Launcher:
    """Return the launcher that parameters name. Imports and calls own code.

    Raises OwnCodeError for a path that gives no launcher, and ParamError for a launch field that it does not use.
    """
    executor = params.launch.executor
    if path_of(executor) in LAUNCHERS:
        return launcher_named(executor)
    launcher: Launcher = call_own(FIELD, executor)
    if not isinstance(launcher, imported(INTERFACE)):
        words = f"{path_of(executor)!r} gives a {type(launcher).__name__}, and not a launcher"
        raise OwnCodeError(FIELD, f"{words}; derive its class from {INTERFACE.replace(':', '.')}")
    for name in SLURM_FIELDS:
        value = getattr(params.launch, name)
        if value != LaunchParams.model_fields[name].default and name not in launcher.fields:
            used = ", ".join(launcher.fields) or "none of its like"
            words = f"{value!r} has no effect: {path_of(executor)} uses {used}; remove it"
            raise ParamError(f"launch.{name}", words)
    return launcher


def launcher_in_run(folder: Path, record: RunRecord) -> Launcher:
    """Return the launcher of a run, in a process of that run: own code is that of the launch. Raises OwnCodeError."""
    if record.executor in LAUNCHERS:
        return launcher_named(record.executor)
    use_code_of(folder)
    return launcher_for(RunParams.from_yaml(folder / "params.yaml"))


def launcher_of(folder: Path, record: RunRecord) -> Launcher:
    """Return the launcher of a run, in any process; for own code that this user may not run, one of its files alone."""
    if record.executor in LAUNCHERS:
        return launcher_named(record.executor)
    files = [folder / name for name in ("run.json", "params.yaml")]
    key = [was_told_to_trust(folder), *(os.stat(file).st_mtime_ns for file in files if file.exists())]
    known = _own.get(folder)
    if known is None or known[0] != key:  # the digests of a folder take long to compare at each look
        known = _own[folder] = (key, _own_launcher(folder, record))
    return known[1]


def _own_launcher(folder: Path, record: RunRecord) -> Launcher:
    try:
        params = RunParams.from_dict(read_params_yaml(folder))
        if path_of(params.launch.executor) == record.executor:  # run.json alone proves nothing
            with own_code_of(folder, params):
                return launcher_for(params)
    except (ParamError, OSError):  # it is somebody else's, or cannot be imported here
        pass
    return launcher_named(record.executor)


def check_no_replay(folder: Path, action: str) -> None:
    """Raise ParamError for a replay, which has neither ranks nor checkpoints. action: such as `resumed`."""
    record = RunRecord.read(folder)
    if record is not None and not launcher_named(record.executor).has_ranks:
        words = f"{folder} is a {replay_words(record.replay_of)}; it cannot be {action}. Launch a run of your own"
        raise ParamError("run", words)
