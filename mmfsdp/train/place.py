"""Place: where a run is, kept in every checkpoint and taken up again from it."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .. import checkpoint, runs
from ..params import RunParams
from ..step import Scaler


@dataclass(frozen=True)
class Learner:
    """What a run trains, and where it keeps it."""

    folder: Path
    params: RunParams
    model: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: Scaler | None
    frozen: dict[str, int]
    """Checksums of the frozen weights as they were loaded."""


@dataclass
class Place:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Positions of the data stream consumed, by all ranks together."""
    skipped: int = 0
    """Steps skipped because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    carried: frozenset[str] = frozenset()
    """Frozen parameters that an earlier part of the run has trained."""
    background: checkpoint.Background | None = None
    """What writes checkpoints while training goes on (`train.async_save`)."""

    @classmethod
    def take_up(cls, learner: Learner) -> Place:
        """Fill model, optimizer, schedule, scaler and random states from the newest complete checkpoint; else begin.

        Every rank must call it. Raises what `checkpoint.resume` raises.
        """
        params, scaler = learner.params, learner.scaler
        newest = checkpoint.newest(learner.folder / "checkpoints")
        background = checkpoint.Background() if params.train.async_save else None
        if newest is None:
            _seed(params, step=0)
            return cls(background=background)
        checkpoint.check_frozen(learner.frozen, checkpoint.marker_of(newest))
        resumed = checkpoint.resume(learner.model, learner.optimizer, newest)
        marker = resumed.marker
        if marker["ranks"] != dist.get_world_size():
            _seed(params, step=marker["step"])
        _set_schedule(learner.optimizer, learner.schedule, marker["schedule"])
        if scaler and marker.get("scaler"):  # a run that goes on in fp16, not one that begins with it
            scaler.load_state_dict(marker["scaler"])
        place = cls(step=marker["step"], carried=resumed.carried, background=background, **marker["place"])
        print(resumed)
        if dist.get_rank() == 0:
            runs.note(learner.folder, "resumed", step=place.step, text=str(resumed))
            if again := place.samples % (dist.get_world_size() * params.train.batch_size):
                print(f"{again} samples are seen again: {place.samples} are no whole number of steps of so many ranks")
        return place

    def passed(self, *, samples: int) -> None:
        """One step more."""
        self.step += 1
        self.samples += samples

    def judge(self, *, skipped: bool) -> None:
        """Whether that step changed any weights."""
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def save(self, learner: Learner) -> None:
        """Write a checkpoint, or with `background` begin to. Every rank must call it."""
        params = learner.params
        record: dict[str, Any] = {
            "schedule": learner.schedule.last_epoch,
            "scaler": learner.scaler.state_dict() if learner.scaler else None,
            "place": {name: getattr(self, name) for name in ("samples", "skipped", "skipped_in_a_row")},
            "params": params.to_dict(),
            "frozen": learner.frozen,
        }
        checkpoint.save(
            learner.folder / "checkpoints",
            model=learner.model,
            step=self.step,
            optimizer=learner.optimizer,
            kind=params.fsdp.state_dict_type,
            keep_last=params.train.keep_last,
            record=record,
            carried=self.carried,
            whole=params.train.save_frozen,
            background=self.background,
            done=_say_saved if dist.get_rank() == 0 else lambda path: None,
        )

    def settle(self, *, wait: bool) -> None:
        """Raise what befell a checkpoint that is being written; with `wait`, once it is complete."""
        if self.background:
            self.background.settle(wait=wait)


def _say_saved(path: Path) -> None:
    print(f"saved {path.name}")
    runs.note(path.parent.parent, "saved", step=int(path.name[5:]), text=f"saved {path.name}")


def _seed(params: RunParams, *, step: int) -> None:
    """Random states of this rank's own, where there are none to take up."""
    seed = zlib.crc32(f"{params.train.seed}/{dist.get_rank()}/{step}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _set_schedule(optimizer: Optimizer, schedule: LambdaLR, epoch: int) -> None:
    schedule.last_epoch = epoch
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(epoch)
