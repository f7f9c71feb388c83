"""Checksums of frozen weights, which checkpoints leave out: that they are those of the run, and did not change."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..params import ParamError
from .ranks import any_rank


def frozen_checksums(model: nn.Module) -> dict[str, int]:
    """CRC-32 of this rank's bytes of every frozen parameter that has any."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad and not p.is_meta)
    return {name: _checksum(p.detach()) for name, p in frozen}


def count_changed(before: dict[str, int], after: dict[str, int]) -> int:
    """How many frozen parameters changed on any rank. Every rank must call it."""
    return sum(any_rank([after.get(name) != before[name] for name in sorted(before)]))


def check_frozen(checksums: dict[str, int], marker: dict[str, Any]) -> None:
    """Compare frozen weights as loaded, before wrapping, with those of the run that saved a checkpoint.

    Raises ParamError naming the first that differs.
    """
    saved = marker.get("frozen", {})
    if odd := [name for name, value in checksums.items() if saved.get(name, value) != value]:
        raise ParamError(
            "model",
            f"{len(odd)} frozen parameters, such as {odd[0]}, are not those that the checkpoint was trained with; "
            "use the backbone weights of that run's params.yaml",
        )


def _checksum(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return zlib.crc32(local.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
