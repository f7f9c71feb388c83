"""Dequantize all nf4 matrices of a unit in one launch of a kernel, to be compared with a launch for each matrix.

Not a part of the package: a layer has 7 matrices, so one launch saves 6 times what a launch costs the host, but all
matrices of the unit are then held in bf16 at once, in forward and again in backward. It is measured first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmfsdp.quantized.nf4_kernel import BYTES


def launch_unit(matrices: Sequence[tuple[Tensor, Tensor, int]], levels: Tensor, block: int) -> list[Tensor]:
    """Return the matrices of a unit in the dtype of levels. matrices: (codes, scales, columns) of each, as `launch`."""
    outs, columns, starts, pieces = [], [], [0], []
    for codes, _, width in matrices:
        outs.append(torch.empty(len(codes), width, dtype=levels.dtype, device=codes.device))
        columns.append(width)
        pieces.append(triton.cdiv(codes.shape[1], BYTES))
        starts.append(starts[-1] + len(codes) * pieces[-1])
    codes, scales, _ = zip(*matrices, strict=True)
    row_bytes = tuple(each.shape[1] for each in codes)
    row_blocks = tuple(each.shape[1] for each in scales)
    arguments: tuple[Any, ...] = (codes, scales, tuple(outs), tuple(columns), row_bytes, row_blocks)
    with torch.cuda.device_of(codes[0]):
        _dequantize_unit[(starts[-1],)](
            levels,
            *arguments,
            tuple(starts),
            tuple(pieces),
            MATRICES=len(outs),
            BLOCK_BYTES=block // 2,
            BYTES=BYTES,
        )
    return outs


@triton.jit
def _dequantize_unit(
    levels,
    codes,
    scales,
    outs,
    columns,
    row_bytes,
    row_blocks,
    starts,
    pieces,
    MATRICES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BYTES: tl.constexpr,
):
    program = tl.program_id(0)
    for i in tl.static_range(MATRICES):
        if program >= starts[i] and program < starts[i + 1]:  # the programs of a matrix follow each other
            row = ((program - starts[i]) // pieces[i]).to(tl.int64)
            piece = (program - starts[i]) % pieces[i]
            # From here as `_dequantize` of mmfsdp/quantized/nf4_kernel.py.
            byte = piece * BYTES + tl.arange(0, BYTES)
            inside = byte < row_bytes[i]
            pair = tl.load(codes[i] + row * row_bytes[i] + byte, mask=inside, other=0).to(tl.int32)
            scale = tl.load(scales[i] + row * row_blocks[i] + byte // BLOCK_BYTES, mask=inside, other=0).to(tl.float32)
            even = tl.load(levels + (pair >> 4)).to(tl.float32) * scale
            odd = tl.load(levels + (pair & 15)).to(tl.float32) * scale
            column = piece * 2 * BYTES + tl.arange(0, 2 * BYTES)
            weights = tl.interleave(even, odd).to(levels.dtype.element_ty)
            tl.store(outs[i] + row * columns[i] + column, weights, mask=column < columns[i])
