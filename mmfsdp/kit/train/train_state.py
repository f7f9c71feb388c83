"""TrainState: how far a run has come, saved in every checkpoint and resumed from it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ... import checkpoint
from ...checkpoint.steps import AVERAGE
from ...core.collectives import gather_json
from ...params import RunParams
from ...params.phases import next_phase
from ..run.files.folder import add_event
from .moving_average import MovingAverage
from .optimizer import Scaler
from .start_from import start_from


@dataclass(frozen=True)
class TrainSetup:
    """The objects that a run trains, and its folder."""

    folder: Path
    params: RunParams
    model: nn.Module
    """Wrapped."""
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: Scaler | None
    frozen: dict[str, int]
    """Checksums of the frozen weights as they were loaded."""


@dataclass
class TrainState:
    """The progress of a training."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Positions of the data stream consumed, by all ranks together."""
    skipped: int = 0
    """Steps skipped because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    best: dict[str, Any] | None = None
    """Step, name and score of the best checkpoint so far (`train.keep_best`)."""
    carried: frozenset[str] = frozenset()
    """Frozen parameters that an earlier part of the run has trained; checkpoints keep them, too."""
    background: checkpoint.Background | None = None
    """Writes checkpoints while training goes on (`train.async_save`)."""
    of_callbacks: dict[str, list[Any]] = field(default_factory=dict)
    """States of the callbacks in the checkpoint that the run was resumed from, as `Callbacks.state_dicts` gave them."""

    began_with: str = ""
    """The run and the step whose weights it began with, in words (`train.start_from`)."""
    resumed_from: Path | None = None
    """The checkpoint that the run was resumed from."""

    def save(
        self, setup: TrainSetup, of_callbacks: Mapping[str, list[Any]], average: MovingAverage | None = None
    ) -> None:
        """Write a checkpoint, or begin to with `background`. Every rank must call it.

        of_callbacks: the states of the callbacks now. average: of the weights, if one is kept.
        """
        params = setup.params
        record: dict[str, Any] = {
            "schedule": setup.schedule.last_epoch,
            "scaler": setup.scaler.state_dict() if setup.scaler else None,
            # Under this key in the checkpoints of every version.
            "place": {"samples": self.samples, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row},
            "best": self.best,
            "callbacks": of_callbacks,
            "began_with": self.began_with,
            "params": params.to_dict(),
            "frozen": setup.frozen,
        }
        checkpoint.save(
            setup.folder / "checkpoints",
            model=setup.model,
            step=self.step,
            optimizer=setup.optimizer,
            kind=params.fsdp.state_dict_type,
            keep_last=params.train.keep_last,
            best=self.best,
            record=record,
            more={AVERAGE: average.tensors()} if average is not None else {},
            carried=self.carried,
            background=self.background,
            done=partial(_report_saved, self.best),
        )


def resume(setup: TrainSetup, *, of_phase_before: bool = False) -> TrainState:
    """Load model, optimizer, schedule, scaler and random states from the newest complete checkpoint, or start from
    the beginning.

    of_phase_before: the checkpoint is of the phase that has just ended. Every rank must call it. Raises what
    `checkpoint.resume` raises, and ParamError for other frozen weights.
    """
    params = setup.params
    background = checkpoint.Background() if params.train.async_save else None
    newest = checkpoint.newest(setup.folder / "checkpoints")
    if newest is None:
        _seed_rank(params, step=0)
        state = TrainState(background=background)
        if params.train.start_from is not None:
            state.began_with, state.carried = start_from(setup.model, params.train, setup.frozen)
            _tell(setup, "begun", state.began_with)
        return state
    marker = checkpoint.marker_of(newest)
    checkpoint.check_frozen(setup.frozen, marker)
    # Python's and NumPy's generators; torch's too, if the checkpoint is of another number of ranks.
    _seed_rank(params, step=marker["step"])
    # The run's parameters say the settings, which may be other ones than at the time of the checkpoint.
    resumed = checkpoint.resume(setup.model, setup.optimizer, newest, settings=False)
    schedule = setup.schedule
    schedule.last_epoch = marker["schedule"]
    for group, base, factor in zip(setup.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(schedule.last_epoch)
    if setup.scaler and marker.get("scaler"):  # missing where the run continues in fp16 and began in another format
        setup.scaler.load_state_dict(marker["scaler"])
    state = TrainState(step=marker["step"], carried=resumed.carried, background=background, **marker["place"])
    state.resumed_from = newest
    state.began_with = marker["began_with"]
    state.of_callbacks = marker["callbacks"]
    text = f"{resumed}{other_rates(marker.get('params', {}).get('train', {}), params.to_dict()['train'])}"
    if of_phase_before:
        _tell(setup, "phase", f"{next_phase(params, state.step)}: {text}", step=state.step)
    else:
        _tell(setup, "resumed", text, step=state.step)
    state.best = _best_so_far(setup, marker)
    return state


def _tell(setup: TrainSetup, kind: str, text: str, *, step: int = 0) -> None:
    """Print what the training begins with, on each rank, and note it as an event."""
    print(text)
    if dist.get_rank() == 0:
        add_event(setup.folder, kind, step=step, text=text)


def other_rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings of the optimizer that are not those of the checkpoint, in words."""
    changed = [name for name in ("lr", "lr_for", "weight_decay") if name in before and before[name] != now[name]]
    return "".join(f"; train.{name} is {now[name]} now, and was {before[name]}" for name in changed)


def _best_so_far(setup: TrainSetup, marker: dict[str, Any]) -> dict[str, Any] | None:
    """Return the best checkpoint as of the one that a run resumes from, if it is there and the score is the same one.

    Every rank must call it.
    """
    best, folder = marker.get("best"), setup.folder / "checkpoints"
    if dist.get_rank() == 0 and best:
        if best["name"] != setup.params.train.keep_best or not checkpoint.is_complete(folder, best["step"]):
            best = None  # another score is asked for, or the checkpoint was removed for a better one after this step
        else:
            checkpoint.mark_best(folder, best)
    return gather_json(best)[0]


def _report_saved(best: dict[str, Any] | None, path: Path) -> None:
    if dist.get_rank() == 0:
        step, text = int(path.name.removeprefix("step_")), f"saved {path.name}"
        if best and best["step"] == step:
            text += f", the best so far: {best['name'].removeprefix('-')} {best['score']:.4g}"
        print(text)
        add_event(path.parent.parent, "saved", step=step, text=text)


def _seed_rank(params: RunParams, *, step: int) -> None:
    """Give this rank random states of its own where no checkpoint has them."""
    seed = zlib.crc32(f"{params.train.seed}/{dist.get_rank()}/{step}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
