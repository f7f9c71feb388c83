"""CRC-32 of a tensor, also of one of which each rank has read a part."""

from __future__ import annotations

import zlib
from functools import cache

import torch

POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the highest bit for x^0, as zlib writes it."""


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor, wherever it lies."""
    # numpy has no bfloat16: as bytes, every dtype has a buffer.
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def checksum_share(checksum: int, bytes_after: int) -> int:
    """Return the share that a part has in the CRC-32 of a whole tensor, which is the XOR of the shares of its parts.

    checksum: the CRC-32 of the part. bytes_after: of the whole tensor behind this part.
    """
    # A CRC is the remainder of a polynomial over GF(2), and each byte that follows multiplies it by x^8.
    # zlib.crc32_combine of Python 3.15 does the same.
    return _product(_power(bytes_after), checksum)


@cache
def _power(size: int) -> int:
    """Return x^(8 * size) modulo the polynomial of CRC-32."""
    power, square = 1 << 31, 1 << 23  # x^0 and x^8
    while size:
        if size & 1:
            power = _product(power, square)
        square = _product(square, square)
        size >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
