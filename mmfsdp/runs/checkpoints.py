"""The checkpoints of a run by name: which are complete, and going back to an older one. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

MARKER = "complete.json"
_NAME = re.compile(r"step_(\d{8})")


def checkpoint_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step_{step:08d}"


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match, checkpoint
    return int(match[1])


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and (p / MARKER).is_file())


def drop_after(folder: Path, step: int) -> Path:
    """Put the checkpoints newer than `step` aside, so that training goes on from there. Returns that of `step`.

    Raises ValueError naming the steps there are.
    """
    by_step = {checkpoint_step(path): path for path in complete_checkpoints(folder)}
    if step not in by_step:
        raise ValueError(f"step: {step} has no complete checkpoint; those of {folder} are {sorted(by_step) or 'none'}")
    for other, path in by_step.items():
        if other > step:
            number = 0
            while (aside := path.with_name(f"dropped_{path.name}-{number}")).exists():
                number += 1
            path.rename(aside)
    return by_step[step]
