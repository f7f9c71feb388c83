"""nf4: 4 bits for each weight, levels close to each other near 0, a scale for each block of 64 columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..core.quantize import Format, relative

BLOCK = 64
"""Columns that share a scale in nf4."""
LEVELS = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0],
    device="cpu",
)
PAIRS = torch.stack((LEVELS.repeat_interleave(16), LEVELS.repeat(16)), dim=1)
"""The two levels of each of the 256 values of a byte: one look-up instead of two, and no shifts."""
PAIRS_OF = {dtype: PAIRS.to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
"""PAIRS in each dtype of compute. Made here, once, since in a step they could be made of fake tensors."""
BOUNDARIES = (LEVELS[1:] + LEVELS[:-1]) / 2
"""Between two of them lie the numbers whose nearest level is the same."""
CELLS = 64
"""A number x from -1 to 1 lies in the cell (x + 1) * CELLS, cut to an integer. No cell has two boundaries in it."""
BOUNDARY_CELLS = ((BOUNDARIES + 1) * CELLS).long()
BELOW = (torch.arange(2 * CELLS + 1, device="cpu")[:, None] > BOUNDARY_CELLS).sum(dim=1).to(torch.uint8)
"""The number of boundaries below each cell: the code of a number there, up to the cell's own boundary."""
BOUNDARY_IN = torch.full((2 * CELLS + 1,), torch.inf, device="cpu").scatter(0, BOUNDARY_CELLS, BOUNDARIES)
"""The boundary in each cell, or infinity."""


class Nf4(Format):
    """Codes uint8 (rows, columns / 2), two in a byte, scales (rows, columns / 64)."""

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales: the largest absolute value of each block. Columns are padded to whole blocks."""
        numbers = F.pad(matrix, (0, -matrix.shape[1] % BLOCK)).view(len(matrix), -1, BLOCK)
        scales = numbers.abs().amax(dim=2)
        numbers = relative(numbers, scales[:, :, None]).reshape(-1)  # from -1 to 1
        # A search among the boundaries would take five times as long. What is not a number gets the last code.
        cells = numbers.add(1).mul_(CELLS).nan_to_num_(2 * CELLS).int()
        above = numbers > BOUNDARY_IN.to(matrix.device).index_select(0, cells)
        codes = (BELOW.to(matrix.device).index_select(0, cells) + above).view(len(matrix), -1)
        # Two codes of 4 bits in a byte: the even columns' in its upper half.
        return codes[:, ::2] * 16 + codes[:, 1::2], scales

    def dequantize(self, codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return each code's level times its block's scale."""
        if codes.is_cuda:
            # torch takes 20 of 80 microseconds of a product to call an operator of ours.
            is_real = not torch.compiler.is_compiling() and not isinstance(codes, FakeTensor)
            return (on_gpu_now if is_real else dequantize_on_gpu)(codes, scales, columns, dtype)
        return look_up(codes, scales, columns, PAIRS_OF[dtype].to(codes.device))


def look_up(codes: Tensor, scales: Tensor, columns: int, pairs: Tensor) -> Tensor:
    """Dequantize nf4 by plain operators, in the dtype of pairs (256, 2)."""
    levels = F.embedding(codes.int(), pairs)  # (rows, columns / 2, 2)
    blocks = levels.view(len(codes), -1, BLOCK).mul_(scales.to(pairs.dtype)[:, :, None])
    return blocks.view(len(codes), -1)[:, :columns]


def on_gpu_now(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix (rows, columns) of nf4 codes on a GPU."""
    fused = fused_kernel(codes.device, dtype)
    if fused is None:
        return look_up(codes, scales, columns, on_gpu(PAIRS, codes.device, dtype)).contiguous()
    levels = on_gpu(LEVELS, codes.device, dtype)
    return fused(codes.contiguous(), scales.to(dtype).contiguous(), levels, columns, BLOCK)


dequantize_on_gpu = torch.library.custom_op("mmfsdp::dequantize_nf4", on_gpu_now, mutates_args=())
"""`on_gpu_now` as one operator of torch, which neither torch.compile nor fake tensors look into."""


@dequantize_on_gpu.register_fake
def _(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(len(codes), columns, dtype=dtype)


@cache  # a copy to a GPU waits for it
def on_gpu(table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the copy of a table on a GPU, which is made once."""
    return table.to(device, dtype)


@cache  # the first launch compiles it
def fused_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """Return the fused kernel; None, with a warning, if triton cannot compile or run it here."""
    codes = torch.zeros(1, BLOCK // 2, dtype=torch.uint8, device=device)
    try:
        from .nf4_kernel import launch

        launch(codes, torch.ones(1, 1, device=device), LEVELS.to(device, dtype), BLOCK, BLOCK)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no triton, C compiler, header of Python, or support of this GPU: each has its own
        warnings.warn(
            "frozen_dtype: nf4 is dequantized by plain operators, which move four times the bytes, since triton "
            f"cannot run a kernel here ({type(error).__name__}: {str(error)[:200]}); install what it names",
            stacklevel=2,
        )
        return None
    return launch


FORMAT = Nf4()
