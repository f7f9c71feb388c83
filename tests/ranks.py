"""Real ranks for tests, as the benches start theirs; and fake ones, whose collectives take no reply."""

import contextlib
from pathlib import Path

import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.bench.spawn_ranks import in_processes, on_ranks

__all__ = ["WAYS", "fake_group", "in_processes", "on_ranks"]
WAYS = yaml.safe_load((Path(__file__).parent / "files/ways_to_wrap.yaml").read_text(encoding="utf-8"))


@contextlib.contextmanager
def fake_group(ranks: int):
    """This process as the first of ranks that only seem to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
