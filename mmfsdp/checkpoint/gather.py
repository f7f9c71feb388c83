"""gather_json: plain data of all ranks, without pickles."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ..core.collectives import group_device, is_distributed, world_size


def gather_json(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return what each rank passes, in order of the ranks. Every rank must call it.

    The values travel as JSON: torch's all_gather_object unpickles, which runs whatever code is sent.
    """
    if not is_distributed():
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=group_device(group))
    sizes = [torch.empty(1, dtype=torch.int64, device=text.device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=text.device), group=group)
    # NCCL gathers tensors of one size only, so shorter texts are padded.
    longest = int(max(sizes))
    texts = [text.new_empty(longest) for _ in sizes]
    dist.all_gather(texts, nn.functional.pad(text, (0, longest - len(text))), group=group)
    return [json.loads(bytes(padded[: int(size)].tolist())) for size, padded in zip(sizes, texts, strict=True)]
