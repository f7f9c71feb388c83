"""Real ranks for tests, as the benches start theirs; and fake ones, whose collectives take no reply."""

import contextlib

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.cli.spawn_ranks import in_processes, on_ranks

__all__ = ["fake_group", "in_processes", "on_ranks"]


@contextlib.contextmanager
def fake_group(ranks: int):
    """This process as the first of ranks that only seem to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
