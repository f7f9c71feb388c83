"""Dequantize nf4 on a GPU in one kernel. It moves 2.5 bytes for each bf16 weight, plain operators 10.5.

This imports triton, which comes with torch's builds for CUDA and compiles the kernel at its first launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024
"""Bytes of codes that one program dequantizes."""


def launch(codes: Tensor, scales: Tensor, levels: Tensor, columns: int, block: int) -> Tensor:
    """Return the matrix (rows, columns) in the dtype of levels, on the device of codes.

    codes: uint8 (rows, bytes), contiguous. scales: (rows, blocks), contiguous, one for each `block` columns.
    levels: (16,).
    """
    rows, row_bytes = codes.shape
    out = torch.empty(rows, columns, dtype=levels.dtype, device=codes.device)
    grid = rows, triton.cdiv(row_bytes, BYTES)
    with torch.cuda.device_of(codes):  # triton launches on the current GPU
        _dequantize[grid](
            codes, scales, levels, out, columns, row_bytes, scales.shape[1], BLOCK_BYTES=block // 2, BYTES=BYTES
        )
    return out


@triton.jit
def _dequantize(
    codes, scales, levels, out, columns, row_bytes, row_blocks, BLOCK_BYTES: tl.constexpr, BYTES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # a matrix may have more than 2^31 elements
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = byte < row_bytes
    pair = tl.load(codes + row * row_bytes + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row * row_blocks + byte // BLOCK_BYTES, mask=inside, other=0).to(tl.float32)
    # The upper half of a byte is the even column's code. Products are in fp32, and rounded once.
    even = tl.load(levels + (pair >> 4)).to(tl.float32) * scale
    odd = tl.load(levels + (pair & 15)).to(tl.float32) * scale
    column = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    weights = tl.interleave(even, odd).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, weights, mask=column < columns)
