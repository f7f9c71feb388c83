"""A run's parameters for a trial on the CPU: few layers, random weights, two ranks, fp32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...params import RunParams
from ..models.kinds import kind_of
from .outcome import RANKS

ROWS = 2
"""Rows of a rank's batch."""


def as_rank(rank: int) -> None:
    """Set the environment variables by which a person's code may know its rank, as torchrun does."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))


def trial_params(params: RunParams, folder: Path) -> RunParams:
    """Return the parameters of a short run of a shallow model on two ranks of this machine's CPU, in a folder."""
    fsdp = params.fsdp
    quantizes = fsdp.frozen_dtype is not None and fsdp.frozen_dtype.quantizes
    changes: dict[str, Any] = {
        "fsdp.mixed_precision": None,
        "fsdp.buffer_dtype": None,
        "fsdp.compile_units": False,
        "fsdp.use_orig_params": None,
        "train.device": "cpu",
        "train.batch_size": min(params.train.batch_size, ROWS),
        "train.lr": max(params.train.lr, 1e-3),  # so that a step shows in the next one
        "train.warmup_steps": 0,
        "train.schedule": "constant",
        "train.profile": 0,
        "train.eval_every": None,
        "train.keep_best": None,
        "train.patience": None,
        "train.ema": None,
        "train.freeze_from": {},
        "train.start_from": None,  # its weights are of all layers
        "train.start_adapters": "keep",
        "train.min_delta": 0.0,
        "train.metrics": [],
        "train.callbacks": [],
        "train.trackers": [],
        "train.async_save": False,
        "launch": {"name": "verify", "folder": str(folder), "ranks": RANKS, "threads": 1},
    }
    if not quantizes:
        changes["fsdp.frozen_dtype"] = None
    if fsdp.dp_replicate or fsdp.dp_shard:
        changes |= {"fsdp.dp_replicate": None, "fsdp.dp_shard": None}
    changed = params.change(**changes)
    return changed.model_copy(update={"model": kind_of(changed.model).few_layers(changed.model, folder)})
