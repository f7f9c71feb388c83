"""int8: 8 bits for each weight, levels evenly spaced, a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.quantize import Format, relative


class Int8(Format):
    """Codes int8 (rows, columns), scales (rows, 1)."""

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales: the largest absolute value of each row."""
        scales = matrix.abs().amax(dim=1, keepdim=True)
        return (relative(matrix, scales) * 127).round().to(torch.int8), scales

    def dequantize(self, codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the codes times their rows' scales over 127."""
        # In fp32: rounded to bf16 it would change one weight in five. A GPU divides by a number as it multiplies by its
        # reciprocal, which is rounded; a CPU does not. A product is the same on both.
        steps = scales.float() * (1 / 127)
        if codes.is_cuda:
            # One kernel, which casts as it reads and writes. On a CPU it would first copy its operands to fp32.
            return torch.mul(codes, steps, out=torch.empty(codes.shape, dtype=dtype, device=codes.device))
        return codes.float().mul_(steps).to(dtype)


FORMAT = Int8()
