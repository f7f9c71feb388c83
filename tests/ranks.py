"""Real ranks for tests, as the benches start theirs; and fake ones, whose collectives take no reply."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmfsdp.kit.spawn_ranks import in_processes, on_ranks

__all__ = ["WAYS", "choices_of", "fake_group", "in_processes", "on_ranks", "printed_by_ranks"]
WAYS = yaml.safe_load((Path(__file__).parent / "files/ways_to_wrap.yaml").read_text(encoding="utf-8"))


def choices_of(ways: dict[str, dict[str, Any]]) -> dict[str, set[tuple]]:
    """Return what occurs in each way to wrap: the values of its fields, each with its backend, and words of its name.

    A word of a name that no field says, such as *tied*, is a choice, too.
    """
    choices = {}
    for name, fields in ways.items():
        backend = fields.get("backend", "FSDP2")
        chosen = {(backend, field, str(value)) for field, value in fields.items()}
        words = {word.strip() for word in name.split(",")[1:]}
        choices[name] = {(backend,), *chosen, *((word,) for word in words)}
    return choices


@contextlib.contextmanager
def fake_group(ranks: int):
    """This process as the first of ranks that only seem to be there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def printed_by_ranks(script: Path, folder: Path, *arguments: str, ranks: int, path: str = "") -> list[str]:
    """Run a script that torchrun starts, in forks that need not import torch; return what each rank prints.

    folder: where it runs. path: a folder from which it imports.
    """
    from tests.tiny_run import free_port

    return in_processes(_run_as_rank, ranks, [str(script), *arguments], str(folder), ranks, free_port(), path)


def _run_as_rank(rank: int, _: str, words: list[str], folder: str, ranks: int, port: int, path: str) -> str:
    from tests.tiny_run import as_rank

    as_rank(rank, ranks, port)
    os.chdir(folder)
    sys.path.insert(0, path or str(Path(words[0]).parent))
    sys.argv[:] = words
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(words[0], run_name="__main__")
    return printed.getvalue()
