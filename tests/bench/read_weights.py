"""`python -m tests.bench.read_weights`: each rank reads its shards of weights, as a run does, beside two other ways.

Writes a random Llama in bf16 to files, and loads it into shards: by `shared_files`, as a run does; by rank 0, which
sends whole tensors, as a run does for ranks that do not see the files; by torch's `HuggingFaceStorageReader`. In turn,
and each time the files are dropped from the page cache first. Prints medians.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from mmfsdp.core.plan import WrapPlan
from mmfsdp.core.wrap import apply_plan
from mmfsdp.kit.models import weight_files
from mmfsdp.kit.spawn_ranks import on_ranks
from mmfsdp.params import FSDPParams
from mmfsdp.planning import make_plan
from tests.counted_files import CountedFiles

CONFIG = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32_000}
SHARD = "100MB"
"""The largest file."""


class CountedReads:
    """Counts the bytes of tensors that are read of mapped safetensors files, and how often one is opened."""

    def __init__(self) -> None:
        self.bytes = self.opened = 0
        self.whole = safetensors.safe_open

    def __call__(self, *args: Any, **kwargs: Any) -> CountedFile:
        """Open a file."""
        self.opened += 1
        return CountedFile(self, self.whole(*args, **kwargs))


class CountedFile:
    """A file of safetensors whose reads are counted."""

    def __init__(self, reads: CountedReads, file: Any) -> None:
        self.reads, self.file = reads, file

    def __enter__(self) -> CountedFile:
        self.file = self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensor(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        return self.count(self.file.get_tensor(key))

    def get_slice(self, key: str) -> CountedSlice:
        """Return a tensor of which a part can be read."""
        return CountedSlice(self, self.file.get_slice(key))

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what was read."""
        self.reads.bytes += tensor.nbytes
        return tensor


class CountedSlice:
    """A tensor of a file of which parts are read."""

    def __init__(self, file: CountedFile, part: Any) -> None:
        self.file, self.part = file, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __getitem__(self, slices: Any) -> torch.Tensor:
        return self.file.count(self.part[slices])


def on_meta(folder: Path) -> nn.Module:
    """Return the model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)


def by_each_rank(folder: Path, model: nn.Module, plan: WrapPlan, *, shared: bool = True) -> nn.Module:
    """Load the model as a run does. shared: False if rank 0 shall read each tensor, and all get it."""
    weights = None
    if dist.get_rank() == 0:
        sources = weight_files.tensor_sources(model, str(folder), "model")
        assert sources is not None
        weights = weight_files.Weights(model, sources)
        if not shared:
            weights = OnRank0(weights)
    return apply_plan(model, plan, weights=weights)


class OnRank0:
    """Weights that do not say where they are, so that no other rank can read them."""

    def __init__(self, weights: weight_files.Weights) -> None:
        self.pop = weights.pop


def by_torch(folder: Path, model: nn.Module, plan: WrapPlan) -> nn.Module:
    """Load the model by torch's reader: each rank reads its shards of every tensor."""
    for unit in sorted(plan.units, key=lambda each: each.is_root):
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(modules if len(modules) > 1 else modules[0])
    model.to_empty(device="cpu")
    saved = dict(model.named_parameters())
    dcp.load(saved, storage_reader=HuggingFaceStorageReader(str(folder)))
    return model


WAYS: dict[str, Callable[[Path, nn.Module, WrapPlan], nn.Module]] = {
    "each rank": by_each_rank,
    "rank 0": partial(by_each_rank, shared=False),
    "torch": by_torch,
}


def in_status(name: str) -> int:
    """Return a figure of this process in bytes, of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def from_disk() -> int:
    """Return the bytes that this process has made the system read from the disk so far."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def load(way: str, folder: str, plan: str) -> dict[str, Any]:
    """Load the model on this rank, and return what it took."""
    torch.set_num_threads(1)
    model, planned = on_meta(Path(folder)), WrapPlan.from_json(plan)
    reads = CountedReads()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
    held, disk, began, computed = in_status("VmRSS"), from_disk(), time.monotonic(), time.process_time()
    with contextlib.ExitStack() as stack:
        for module in (safetensors, weight_files):
            stack.enter_context(mock.patch.object(module, "safe_open", reads))
        files = stack.enter_context(CountedFiles().counting())
        model = WAYS[way](Path(folder), model, planned)
    computed = time.process_time() - computed
    dist.barrier()
    return {
        "seconds": time.monotonic() - began,
        "computed": computed,
        "asked": reads.bytes + files.bytes,
        "opened": reads.opened + files.opened.total(),
        "disk": from_disk() - disk,
        "memory": in_status("VmHWM") - held,
        "shards": {name: checksum(p) for name, p in model.named_parameters()},
    }


def checksum(parameter: torch.Tensor) -> int:
    """Return the CRC-32 of this rank's part of a parameter."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return zlib.crc32(part.detach().contiguous().view(torch.uint8).numpy().data)


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Print the medians of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    choices = parser.parse_args()
    rows: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = AutoConfig.for_model("llama", **CONFIG, num_hidden_layers=choices.layers)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD)
        plan = make_plan(on_meta(folder), FSDPParams(), world_size=choices.ranks).to_json()
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{stored / 1e6:.0f} MB in {len(list(folder.glob('*.safetensors')))} files, {choices.ranks} ranks")
        for _ in range(choices.rounds):
            for way, of_way in rows.items():
                forget(folder)
                of_way.append(on_ranks(partial(load, way), choices.ranks, name, plan))
    shards = [[row["shards"] for row in of_way[0]] for of_way in rows.values()]
    assert all(of_way == shards[0] for of_way in shards), "each way loads the same shards"
    for way, of_way in rows.items():
        figures = {
            "seconds": statistics.median(max(row["seconds"] for row in ranks) for ranks in of_way),
            "CPU seconds": statistics.median(sum(row["computed"] for row in ranks) for ranks in of_way),
            "asked of the files, MB": statistics.median(sum(row["asked"] for row in ranks) for ranks in of_way) / 1e6,
            "from the disk, MB": statistics.median(sum(row["disk"] for row in ranks) for ranks in of_way) / 1e6,
            "files opened": statistics.median(sum(row["opened"] for row in ranks) for ranks in of_way),
            "memory of rank 0, MB": statistics.median(ranks[0]["memory"] for ranks in of_way) / 1e6,
            "of the others, MB": statistics.median(max(r["memory"] for r in ranks[1:]) for ranks in of_way) / 1e6,
        }
        print(f"{way:<9}", ", ".join(f"{name} {value:,.1f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
