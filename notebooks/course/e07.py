"""Checks of 07_checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .checks import exercise, run_of, unanswered


@exercise("07.contents")
def contents(needed: Mapping[str, object]) -> str | None:
    """All but activations and frozen weights."""
    if hint := unanswered(needed):
        return hint
    if not needed["the optimizer's moments"]:
        return "Without its moments, AdamW's next steps are those of a fresh start: too long, in other directions."
    if not needed["the position in the learning rate schedule"]:
        return "Without it, the learning rate begins again with its warm-up."
    if not needed["the random state of every rank"]:
        return "Dropout and augmentation draw numbers. From another state they draw others, and the losses differ."
    if not needed["the position in the data"]:
        return "Without it, the run sees its first samples twice and others never."
    if needed["the activations of the last step"]:
        return "Each step makes its own. What is between two steps is what counts."
    if needed["the frozen weights themselves"]:
        return "They are in the backbone's own files and do not change: a name and a checksum are enough."
    return None


@exercise("07.resume")
def resume() -> str | None:
    """The losses of the unbroken run, bit by bit."""
    run, whole = run_of("stopped"), run_of("whole")
    if isinstance(run, str):
        return run
    if isinstance(whole, str):
        return whole
    rows = run.metrics()
    if len(rows) < len(whole.metrics()):
        return (
            f"It has done {len(rows)} of {len(whole.metrics())} steps. `stopped.resume(params=...)` with those that "
            "ask for all of them, and `.wait()` for its end."
        )
    if [row["loss"] for row in rows] != [row["loss"] for row in whole.metrics()]:
        return "The losses differ from the unbroken run's. Only `launch.name` may differ in the parameters."
    return None


@exercise("07.reshard")
def reshard() -> str | None:
    """It went on, on one rank."""
    run = run_of("resharded")
    if isinstance(run, str):
        return "Fill in both changes, then run the two cells: " + run
    params, state = run.params, run.state()
    if params.launch.ranks != 1:
        return f"It went on with {params.launch.ranks} ranks; one was asked for."
    if params.fsdp.sharding_strategy.name != "SHARD_GRAD_OP":
        return f"Its strategy is {params.fsdp.sharding_strategy.name}; SHARD_GRAD_OP was asked for."
    return None if state.ok and len(run.metrics()) == params.train.steps else f"It has not completed: {state}."


@exercise("07.damage")
def damage(folder: str | Path) -> str | None:
    """The one before the newest."""
    name = Path(folder).name
    whole = run_of("whole")
    if isinstance(whole, str):
        return whole
    steps = sorted(path.name for path in whole.path.glob("checkpoints/step_*"))
    if name == steps[-1]:
        return "That is the damaged one. Which one does the message offer?"
    if name in steps[:-2]:
        return "That one is whole, but a newer one is, too: a resume from it loses fewer steps."
    return None if name == steps[-2] else f"Read the end of the message: it is one of {', '.join(steps)}."
