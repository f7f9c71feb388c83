"""The lengths of records that an order by length needs, measured by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from ...params import RunParams
from ..data.loader import processor_of
from ..data.open_sources import Splits
from ..data.processor import SampleProcessor
from ..data.record_sizes import add_lengths, lengths_of
from ..data.sources.stream import IndexedSource
from ..run.ranks.hang import Heartbeat


def measure_lengths(
    params: RunParams,
    processor: SampleProcessor,
    sources: Mapping[str, Splits],
    device: torch.device,
    beat: Heartbeat,
) -> None:
    """Measure the records of each source that is arranged by length: each rank a share. Every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for place, own in params.data.sources().items():

        def measure(source: IndexedSource, its_processor: SampleProcessor, place: str = place) -> np.ndarray:
            def tell(share: float) -> None:
                beat(f"opening the data: lengths of {place}, {share:.0%}")

            lengths = lengths_of(source, its_processor, part=slice(rank, None, ranks), tell=tell)
            shared = torch.from_numpy(lengths).to(device)
            dist.all_reduce(shared)
            return shared.cpu().numpy()

        add_lengths(sources[place]["train"], processor_of(processor, own), place, measure)
