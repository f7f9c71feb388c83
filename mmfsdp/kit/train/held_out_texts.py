"""Texts of a model in training for held-out samples, generated on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...core.freeze import train_mode
from ...core.inference import keep_gathered
from ...params import RunParams
from ..data.own_processor import accepted
from ..data.own_random import own_random
from ..data.processor import SampleProcessor
from .callbacks import Training
from .evaluate import generate


@dataclass(frozen=True)
class Share:
    """The held-out samples that a rank generates from."""

    processor: SampleProcessor
    own: list[Any]
    """Samples of this rank: every world_size-th of those of all ranks."""
    stand_in: Any
    """Another one, where this rank has fewer than the others."""
    calls: int
    """Calls of `generate`, on every rank."""
    samples: list[Any]
    """Samples of all ranks in order, on rank 0."""

    @classmethod
    def deal(cls, processor: SampleProcessor, samples: list[Any], batch_size: int) -> Share:
        """Return this rank's share of samples, which are the same ones on every rank, and at least one."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        calls = math.ceil(math.ceil(len(samples) / ranks) / batch_size)
        return cls(processor, samples[rank::ranks], samples[0], calls, samples if rank == 0 else [])


def texts_of_rank(training: Training, share: Share, step: int) -> list[str]:
    """Return what the model says to this rank's samples.

    Every rank must call it, and calls `generate` as often as the others do. Leaves the model in training mode, sharded
    as between two steps, and the random states as they were.
    """
    params, model = training.setup.params, training.setup.model
    size, texts = params.train.batch_size, []
    # A rank whose texts have ended goes on with the others: each of their tokens is a forward of all ranks.
    options = {"synced_gpus": True} if generates_together(params, dist.get_world_size()) else {}
    model.eval()
    try:
        with torch.no_grad(), keep_gathered(model), own_random(params.train.seed), uncompiled(params):
            for start in range(0, share.calls * size, size):
                training.beat(f"step {step} held-out texts")
                batch = share.own[start : start + size]
                _, new_ids = generate(model, share.processor, batch or [share.stand_in], **options)
                texts += share.processor.decode(new_ids)[: len(batch)]
    finally:
        train_mode(model)
    return texts


def uncompiled(params: RunParams) -> AbstractContextManager[Any]:
    """Return a context in which compiled units run as they were written.

    Each new token makes a text of another length. torch would compile for them, which takes minutes, and after some of
    them compile no more, also not for the lengths of training (`torch._dynamo.config.recompile_limit`).
    """
    if not params.fsdp.compile_units:
        return nullcontext()  # torch.compiler imports all of dynamo
    return torch.compiler.set_stance("force_eager")


def in_order(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return the texts of all ranks in the order of their samples, which were dealt to the ranks in turn."""
    total = sum(map(len, of_ranks))
    return [of_ranks[place % len(of_ranks)][place // len(of_ranks)] for place in range(total)]


def generates_together(params: RunParams, ranks: int) -> bool:
    """Return True if each forward of a rank needs the weights of the others."""
    return params.fsdp.effective_backend.rules.shards and ranks > 1


def why_not_together(params: RunParams, model: nn.Module) -> str:
    """Return why a model cannot generate on its ranks, though it can on one; "" if it can."""
    generates: Any = model.generate
    if not generates_together(params, params.launch.world_size) or accepted(generates, synced_gpus=True):
        return ""
    return (
        f"with {params.fsdp.effective_backend} every rank must generate as many tokens as the others, and the model's "
        "generate takes no synced_gpus; pass its keywords on to transformers' generate, or set fsdp.backend to DDP"
    )
