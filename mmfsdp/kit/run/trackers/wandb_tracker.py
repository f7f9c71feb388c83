"""Weights & Biases: offline in the run folder, in `wandb/`, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ....params import RunParams
from ..files.folder import make_inner_folder
from .track import State, Tracker


class WandbTracker(Tracker):
    """Logs each step's metrics over a step of its own: the steps that a resumed run does again come twice.

    W&B's own step can only grow.
    """

    def __init__(self, folder: Path, params: RunParams, state: State) -> None:
        import wandb

        make_inner_folder(folder / "wandb")
        state.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mmfsdp"),
            name=folder.name,
            id=state["id"],
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config=params.to_dict(),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
        )
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Log the metrics of a step."""
        self._run.log({"train_step": step, "time": at, **values})

    def close(self) -> None:
        """Finish the run of this process; a later one goes on with it."""
        self._run.finish()


def open_wandb(folder: Path, params: RunParams, state: State) -> Tracker:
    """Return the tracker that writes for Weights & Biases."""
    return WandbTracker(folder, params, state)
