"""Frozen units in 4 bits for the course's FSDP: what a rank keeps and sends of them are codes and scales, as bytes.

The format is nf4's of mmfsdp/quantized/nf4.py, for blocks of 64 numbers of a flattened shard: 32 bytes of codes, two
in a byte, and the scale in fp32.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mmfsdp import FSDPParams, make_plan
from mmfsdp.kit.cli.class_copy import unpacked

from .collectives import all_gather
from .proof import shard_as_planned, train
from .toys import pictures_and_texts, toy_vlm

Pack = Callable[[torch.Tensor], torch.Tensor]
Fill = Callable[[Any, torch.Tensor], None]
ADDED = Path(__file__).with_name("in_4_bits.py")
MIDDLE = "# ---- yours ----\n"
"""The line of ADDED after which the functions of the exercise stand."""


def numbers_to_pack() -> torch.Tensor:
    """Return 214 numbers, in blocks of 64 the last of which has zeros only."""
    return torch.cat([torch.linspace(-0.3, 0.2, 150), torch.zeros(64)])


def make_room(piece: Any) -> None:
    """Give the storage of a whole parameter its size."""
    whole = piece.whole
    whole.untyped_storage().resize_(whole.nbytes)


def gather_bytes(unit: Any, fill: Fill) -> None:
    """All-gather the bytes of a unit's shards, and fill its parameters."""
    mine = torch.cat([piece.packed.flatten() for piece in unit.pieces])
    rows = mine.new_empty(dist.get_world_size(), len(mine))
    all_gather(rows.view(-1), mine)
    sizes = [piece.packed.numel() for piece in unit.pieces]
    for piece, parts in zip(unit.pieces, rows.split(sizes, dim=1), strict=True):
        fill(piece, parts)
    unit.gathered = True


def train_vlm(my_fsdp: Any, pack: Pack | None = None, fill: Fill | None = None) -> dict[str, Any]:
    """Train the small model that sees, in bf16; with `pack` and `fill` its frozen units are in 4 bits. The losses, and
    the bytes sent in a step."""
    gather_numbers = my_fsdp.gather
    params = FSDPParams(frozen_policy="SHARD", mixed_precision="bf16")
    plan = make_plan(toy_vlm(), params, world_size=dist.get_world_size(), example=pictures_and_texts(0))

    def gather(unit: Any) -> None:
        if unit.trains or unit.gathered or fill is None:
            gather_numbers(unit)
        else:
            gather_bytes(unit, fill)

    def shard(model: nn.Module) -> list[Any]:
        units = shard_as_planned(my_fsdp.shard, model, plan, dtype=torch.bfloat16)
        for unit in units:
            for piece in unit.pieces if pack and not unit.trains else []:
                piece.packed = pack(piece.shard.detach().flatten())
        return units

    my_fsdp.gather = gather  # which the hooks call
    try:
        return train(shard, toy_vlm, pictures_and_texts)
    finally:
        my_fsdp.gather = gather_numbers


def fill_one(my_fsdp: Any, pack: Pack, fill: Fill) -> torch.Tensor:
    """Return what `fill` makes of the bytes of two ranks' shards of `weight_of_7_rows`."""
    layer = nn.Linear(10, 7, bias=False)
    layer.weight.data.copy_(weight_of_7_rows())
    layer.requires_grad_(False)
    piece = my_fsdp.Piece(layer.weight, [(layer, "weight")], torch.float32)
    padded = nn.functional.pad(weight_of_7_rows(), (0, 0, 0, 1))  # 8 rows: 4 for each rank
    fill(piece, torch.stack([pack(rows.flatten()).flatten() for rows in padded.chunk(2)]))
    return layer.weight.detach().clone()


def weight_of_7_rows() -> torch.Tensor:
    """A matrix (7, 10), the same each time."""
    return torch.randn(7, 10, generator=torch.Generator().manual_seed(0))


def file_in_4_bits(text: str, cell: str) -> str:
    """Return the text of my_fsdp.py with frozen units in 4 bits. cell: of 11.four_bits, whose functions it takes."""
    functions = [
        ast.get_source_segment(cell, node) for node in ast.parse(cell).body if isinstance(node, ast.FunctionDef)
    ]
    added = ADDED.read_text(encoding="utf-8")
    before, after = (unpacked(added) or added).split(MIDDLE)  # it is packed in the class's copy
    return "\n\n\n".join([text, before + MIDDLE, *filter(None, functions), after])
