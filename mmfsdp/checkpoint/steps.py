"""The folder of a run's checkpoints: which are complete, and what one says of itself. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ..params import ParamError

MARKER = "complete.json"
"""The file that makes a checkpoint complete. It is written last."""
BEST = "best.json"
"""The file beside the checkpoints that says which one has the best score (`train.keep_best`)."""
AVERAGE = "ema"
"""The subfolder of a checkpoint with the moving average of its weights (`train.ema`)."""
_REQUIRED = {"step", "kind", "ranks", "names", "carried", "optimizer", "groups", "schedule_state", "files"}
"""Keys of the marker, without which nothing can be loaded."""
_CHECKSUM = re.compile(rb'\{"sha256": "([0-9a-f]{64})", ')
"""The beginning of a marker: the checksum of all that follows it."""
_NAME = re.compile(r"step_\d{8}")


class DamagedCheckpoint(ParamError):
    """A file of a checkpoint is not what was written."""


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and (p / MARKER).is_file())


def is_complete(folder: Path, step: int) -> bool:
    """Return True if there is a complete checkpoint of a step."""
    return (folder / checkpoint_name(step) / MARKER).is_file()


def best_of(folder: Path) -> dict[str, Any] | None:
    """Return which checkpoint has the best score: step, name and score; None if none is marked and there."""
    try:
        mark = json.loads((folder / BEST).read_bytes())
        step, name, score = mark["step"], mark["name"], mark["score"]
        is_valid = type(step) is int and isinstance(name, str) and isinstance(score, (int, float))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if not is_valid or not is_complete(folder, step):
        return None
    return {"step": step, "name": name, "score": float(score)}


def mark_best(folder: Path, best: dict[str, Any]) -> None:
    """Say which checkpoint has the best score: step, name and score."""
    unfinished = folder / f".{BEST}.writing"
    unfinished.write_text(json.dumps(best) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / BEST)


def best(folder: Path) -> Path:
    """Return the complete checkpoint with the best score. Raises ParamError if there is none."""
    mark = best_of(folder)
    if mark is None:
        raise ParamError("checkpoint", f"{str(folder)!r} has no best checkpoint; train with train.keep_best")
    return folder / checkpoint_name(mark["step"])


def latest(folder: Path) -> Path:
    """Return the newest complete checkpoint. Raises ParamError if there is none."""
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        raise ParamError("checkpoint", f"{str(folder)!r} holds no complete checkpoint; train and save one first")
    return checkpoints[-1]


def drop_after(folder: Path, step: int) -> None:
    """Rename the checkpoints newer than `step`, so that training resumes there.

    Raises ParamError naming the steps that there are.
    """
    by_step = {checkpoint_step(path): path for path in complete_checkpoints(folder)}
    if step not in by_step:
        complete = sorted(by_step) or "none"
        raise ParamError("step", f"{step} has no complete checkpoint; those of {folder} are {complete}")
    for other, path in by_step.items():
        number = 0
        while (folder / f"dropped_{path.name}-{number}").exists():
            number += 1
        if other > step:
            path.rename(folder / f"dropped_{path.name}-{number}")


def has_average(checkpoint: Path) -> bool:
    """Return True if a checkpoint has a moving average of its weights. Raises DamagedCheckpoint as `marker_of`."""
    return any(name.startswith(f"{AVERAGE}/") for name in marker_of(checkpoint)["files"])


def marker_of(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself. Raises DamagedCheckpoint if that cannot be read or was altered."""
    try:
        content = (checkpoint / MARKER).read_bytes()
        begin = _CHECKSUM.match(content)
        if not begin or hashlib.sha256(content[begin.end() :]).hexdigest() != begin[1].decode():
            raise ValueError("the checksum differs")
        marker = json.loads(content)
        if not _REQUIRED <= set(marker):
            raise ValueError("keys are missing")
        return marker
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise damaged(checkpoint, MARKER) from error


def write_marker(checkpoint: Path, marker: dict[str, Any]) -> None:
    """Write what a checkpoint says of itself, behind the checksum of it, and wait until the disk has it."""
    content = json.dumps(marker).encode().removeprefix(b"{")
    checksum = hashlib.sha256(content).hexdigest()
    with open(checkpoint / MARKER, "wb") as file:
        file.write(b'{"sha256": "%b", %b' % (checksum.encode(), content))
        file.flush()
        os.fsync(file.fileno())


def file_checksum(path: Path) -> list[Any]:
    """Return a file's size and SHA-256, once the disk has it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]


def damaged(checkpoint: Path, name: str) -> DamagedCheckpoint:
    """Return the error for a file that is not what was written. It offers the checkpoint before."""
    earlier = [path for path in complete_checkpoints(checkpoint.parent) if path < checkpoint]
    fix = "there is none before it: train from the beginning"
    if earlier:
        step = checkpoint_step(earlier[-1])
        fix = f"the one before is {earlier[-1].name}: go on from it with `mmfsdp resume RUN --step {step}`"
    return DamagedCheckpoint("checkpoint", f"{checkpoint / name} is missing, truncated or altered; {fix}")
