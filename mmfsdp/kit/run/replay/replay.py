"""replay: play a recorded run in a run folder of its own, without its ranks, its GPUs or its cluster."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ....params import LaunchParams, ParamError, RunParams
from ..files.folder import PathLike, write_json, write_text
from ..files.run_record import REPLAY, RunState, Status, because, values_of_state, write_status
from ..handle import Run
from ..start import free_name, make_folder, runs_folder, start_detached
from ..state import run_state
from .player import PLAYER_LOG, Player
from .recorder import recording_of
from .recording import Recording, find_recording

DEFAULT_SPEED = 10.0
MAX_SPEED = 1e6


def replay(recording: PathLike, *, to: PathLike | None = None, speed: float = DEFAULT_SPEED) -> Run:
    """Start to play a recorded run, and return. Panels, cockpit and commands show it as they show a run.

    Args:
        recording: The name of a recording of this package (preemption, hang, out_of_memory), the file of one, or the
            folder of a run that has ended. What it holds is data; nothing of it is executed.
        to: The run folder to write, which must not exist. Default: runs/NAME-replay, or the next free name.
        speed: How many times as fast as it was recorded. Default 10.

    Returns:
        A handle on the replay: `run.wait()`, `run.logs()`, `run.cancel()`. It cannot be resumed.

    Raises:
        ParamError: If there is no such recording, the folder exists already, or the speed is not positive.
    """
    speed = check_speed(speed)
    source = find_recording(recording).absolute()
    loaded = load(source)
    if source.is_dir() and not (state := run_state(source)).done:
        raise ParamError("recording", f"{source} is {state}; play it once it has ended")
    folder = _prepare(loaded, source, to)
    try:
        start_detached(folder, REPLAY, str(speed), str(source), log=folder / "logs" / PLAYER_LOG)
    except BaseException:
        shutil.rmtree(folder)  # no process left, or an interrupt: half a replay would keep the name
        raise
    return Run(folder)


def _prepare(recording: Recording, source: Path, to: PathLike | None) -> Path:
    """Make the run folder of a replay at `to`, or at the first place that is free. Raises ParamError."""
    while True:
        try:
            return prepare(recording, params_for(recording, source, to))
        except ParamError as error:
            if to is not None and error.field == "launch.name":
                raise ParamError("to", f"{str(to)!r} exists already; name another folder, or remove this one") from None
            if to is not None and error.field == "launch.folder":
                raise ParamError("to", error.message) from None
            if error.field != "launch.name":
                raise
            # Another replay has just taken that place: take the next one.


def check_speed(speed: float) -> float:
    """Return a speed as a number. Raises ParamError for one that is not between 0 and MAX_SPEED."""
    try:
        number = float(speed)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= MAX_SPEED:
        words = f"{speed!r} is not a number above 0 and at most {MAX_SPEED:,.0f}; 10 plays ten times as fast"
        raise ParamError("speed", words)
    return number


def load(source: Path) -> Recording:
    """Return the recording in a file, or of the run in a folder. Raises ParamError for anything else."""
    return recording_of(source) if source.is_dir() else Recording.read(source)


def params_for(recording: Recording, source: Path, to: PathLike | None) -> RunParams:
    """Return the parameters of a replay: the recorded ones, with a name and a folder of its own.

    Raises ParamError for parameters that this version does not know, and for a name that no run can have.
    """
    try:
        params = RunParams.from_dict(recording.params)
    except ParamError as error:
        raise ParamError("recording", f"{source} has parameters that cannot be read: {error}") from None
    target = Path(os.path.expanduser(to)).absolute() if to is not None else _free_place(source)
    place = {"launch.name": target.name, "launch.folder": str(target.parent), "launch.replace": False}
    try:
        return params.change(**place)
    except ParamError as error:
        raise ParamError("to", f"{str(to)!r} cannot be a run folder: {error.message}") from None


def _free_place(source: Path) -> Path:
    """Return the first of runs/NAME-replay, runs/NAME-replay-2, ... that is free."""
    name = source.name if source.is_dir() else source.stem
    name = re.sub(r"[^\w.+-]+", "-", name).lstrip(".+-")[:80] or "recording"  # what a run may be called
    parent = runs_folder(LaunchParams())
    return parent / free_name(parent, f"{name}-replay")


def prepare(recording: Recording, params: RunParams) -> Path:
    """Make the run folder of a replay, as it is at the launch of the recorded run. Raises ParamError if it exists."""
    folder = make_folder(params.launch)
    try:
        write_text(folder / "params.yaml", params.to_yaml())
        if recording.plan:
            write_json(folder / "plan.json", recording.plan)
        now = time.time()
        record = replace(recording.run, executor=REPLAY, created=now, replay_of=recording.about)
        write_json(folder / "status.json", values_of_state(RunState(Status.QUEUED)) | {"alive": now})
        record.write(folder)
    except BaseException:
        shutil.rmtree(folder)  # no disk space, or an interrupt
        raise
    return folder


def play(folder: Path, speed: float, source: Path) -> None:
    """Play a recording in a folder that `prepare` has made; in a process of its own."""
    try:
        Player(folder, load(source)).play(speed)
    except Exception as error:
        words = f"its player has failed: {error or type(error).__name__}; start another replay"
        with suppress(OSError):  # a full disk: then it counts as lost after GONE_AFTER_S
            write_status(folder, because(Status.LOST, words), finished=time.time())
        raise
