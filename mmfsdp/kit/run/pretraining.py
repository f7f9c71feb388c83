"""The small backbones of a run that are pretrained before its ranks start, by a process beside its supervisor.

On Slurm the process that submits the job starts it, and submits once they are there. The pretraining belongs to the
run: closing the notebook does not end it, cancelling the run does.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...params import GENERATED, ParamError, RunParams
from .files.folder import NUMBER, Types, last_line, of_types, open_own, read_json, write_json
from .files.history import BACKBONES, add_moment
from .files.run_record import TRAININGS, RunState, Status, because, write_status

FILE = "backbones.json"
"""The file of their progress, in logs/ of the run folder."""
LOG = "backbones.log"
"""The file beside it into which the process prints."""
TYPES: Types = {"label": str, "share": NUMBER, "left_s": NUMBER, "error": str, "kind": str, "traceback": str}
WRITE_INTERVAL_S = 0.3
"""Seconds between two writings of how far it is."""
ALIVE_INTERVAL_S = 10.0
"""Seconds between two writings of status.json, by which other machines know that somebody works."""
POLL_S = 0.1
MAX_LEFT_S = 1e6


class BackbonesProgress(NamedTuple):
    """Say how far the pretraining of a run's backbones is."""

    label: str = ""
    """The backbone that is being pretrained; empty until the work begins."""
    share: float = 0.0
    """The share of the work on that backbone that is done, between 0 and 1."""
    left_s: float | None = None
    """Seconds until that is done; None while unknown."""


def pretrains(params: RunParams, entry: str) -> bool:
    """Return whether the backbones of a run that calls this entry are not there yet.

    Imports torch only where some weights are `generated`: the folder that they are in depends on the kind of model.
    """
    model = params.model
    weights = (model.weights, model.vision.weights, model.language.weights)
    if entry not in TRAININGS or GENERATED not in weights:
        return False
    from ..shapes.pretrain import needs_backbones

    return needs_backbones(model)


def backbones_progress(folder: Path) -> BackbonesProgress:
    """Return how far the backbones of a run are that is PREPARING."""
    values = of_types(read_json(folder / "logs" / FILE) or {}, TYPES)
    share = min(1.0, max(0.0, values.get("share", 0.0)))
    left_s = values.get("left_s")
    if left_s is not None and not 0 <= left_s < MAX_LEFT_S:  # also what is no number
        left_s = None
    return BackbonesProgress(values.get("label", ""), share, left_s)


def pretrain_first(folder: Path, stop_requested: Callable[[], RunState | None]) -> RunState | None:
    """Pretrain the backbones of a run in a process, and wait for it. Return None once they are there.

    Returns the state that the run ends in, if `stop_requested` gives one or the pretraining fails.
    """
    (folder / "logs" / FILE).unlink(missing_ok=True)  # of an earlier start
    with open_own(folder / "logs" / LOG, "wb") as log:
        command = [sys.executable, "-m", "mmfsdp.kit.run", str(folder), "backbones"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    written = 0.0
    while process.poll() is None:
        if state := stop_requested():
            process.kill()
            process.wait()
            return state
        if time.monotonic() > written + ALIVE_INTERVAL_S or not written:
            write_status(folder, RunState(Status.PREPARING), alive=time.time())
            written = time.monotonic()
        time.sleep(POLL_S)
    if process.returncode == 0:
        return stop_requested()
    values = of_types(read_json(folder / "logs" / FILE) or {}, TYPES)
    error = values.get("error") or f"exit code {process.returncode}; {last_line(folder / 'logs' / LOG)}"
    cause = f"the backbones could not be pretrained: {error}"
    return because(Status.FAILED, cause, kind=values.get("kind", ""), traceback=values.get("traceback", ""))


def ensure_backbones(params: RunParams, progress: Callable[[str, float], None]) -> None:
    """Pretrain the backbones of a run in this process, unless they are there. Raises as kit/shapes/pretrain.py does."""
    from ..shapes import pretrain  # imports torch

    pretrain.ensure_backbones(params, progress)


def pretrain_here(folder: Path) -> None:
    """Pretrain the backbones of a run in this process, and write how far it is into the run folder."""
    path = folder / "logs" / FILE
    write_json(path, {})
    first: dict[str, tuple[float, float]] = {}
    """Of each part: when its first step was done, and the share of it that this was."""
    written, told = 0.0, ("", 0)

    def progress(label: str, share: float) -> None:
        nonlocal written, told
        now = time.monotonic()
        began, share_then = first.setdefault(label, (now, share))
        if share < 1 and now < written + WRITE_INTERVAL_S:
            return
        values: dict[str, str | float] = {"label": label, "share": share}
        if share > share_then:
            values["left_s"] = (now - began) * (1 - share) / (share - share_then)
        write_json(path, values)
        written = now
        if (label, int(10 * share)) != told:
            told = (label, int(10 * share))
            add_moment(folder, BACKBONES, values)

    try:
        params = RunParams.from_yaml(folder / "params.yaml")
        ensure_backbones(params, progress)
    except Exception as error:
        is_mistake = isinstance(error, ParamError)
        lines = "" if is_mistake else traceback.format_exc()
        write_json(path, {"error": str(error) or type(error).__name__, "traceback": lines[-20_000:]})
        raise SystemExit(str(error)) from None
