"""HeldOut: the loss on samples that no training shows, over all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..data.batch import Batch, Sample
from ..data.pictures import CorruptRecord
from ..data.processor import Processor, Row
from ..data.sources import open_source
from ..params import ParamError, RunParams
from ..step.core import label_tokens, token_sum
from ..step.ranks import device_of, on, sum_over_ranks
from ..wrap import reshard


@dataclass
class HeldOut:
    """The first held-out samples of each source, dealt to the ranks."""

    every: int
    """Steps between two measurements."""
    batches: list[Batch]
    """This rank's, of each source as many as any rank has; those beyond its samples have nothing to learn from."""

    @classmethod
    def open(cls, params: RunParams, processor: Processor) -> HeldOut | None:
        """What `train.eval_every` asks for, if it does. Every rank must call it.

        Raises ParamError where a source cannot be opened, or none of its held-out samples can be used.
        """
        settings, rank, world = params.train, dist.get_rank(), dist.get_world_size()
        if settings.eval_every is None:
            return None
        sizes = [settings.batch_size, *(more.batch_size or settings.batch_size for more in params.data.more)]
        found = []
        for i, ((place, one), size) in enumerate(zip(params.data.sources().items(), sizes, strict=True)):
            seed = settings.seed + i
            source = open_source(one, split="heldout", image_size=processor.image_size, seed=seed, place=place)
            fitted = replace(processor, max_length=one.max_length)
            rows = list(_rows(fitted, islice(source, rank, settings.eval_samples, world)))
            of_all: list[Any] = [None] * world
            dist.all_gather_object(of_all, len(rows))
            if not any(of_all):
                raise ParamError(
                    "train.eval_every",
                    f"no held-out sample of {place} can be used; raise {place}.max_length, or unset this",
                )
            found += [
                replace(fitted.collate(rows[start : start + size]), weight=one.weight, source=place)
                for start in range(0, max(of_all), size)
            ]
        return cls(settings.eval_every, found)

    def loss(self, model: nn.Module) -> dict[str, float]:
        """heldout_loss, in the units of `train_step`'s; heldout_s, seconds it took. Every rank must call it.

        Leaves the model in training mode, and sharded as between two steps.
        """
        start, device = time.perf_counter(), device_of(model)
        weights = {batch.source: batch.weight for batch in self.batches}
        sums = {place: torch.zeros((), dtype=torch.float64, device=device) for place in weights}
        tokens = dict.fromkeys(weights, 0)
        model.eval()
        with torch.no_grad():
            for batch in self.batches:
                here = label_tokens(batch)
                sums[batch.source] += token_sum(model(**batch.to(device).inputs()).loss.float(), here)
                tokens[batch.source] += here
        model.train()
        reshard(model)
        summed, counts = sum_over_ranks(torch.stack([torch.stack([*sums.values()]), on(device, [*tokens.values()])]))
        loss = (summed / counts) @ on(device, [*weights.values()])
        return {"heldout_loss": float(loss), "heldout_s": time.perf_counter() - start}


def _rows(processor: Processor, samples: Iterable[Sample]) -> Iterator[Row]:
    for sample in samples:
        try:
            yield processor.encode(sample)
        except CorruptRecord:
            continue  # training skips its like, too
