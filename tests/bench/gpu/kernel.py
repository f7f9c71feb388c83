"""Compare the fused kernel of nf4 with plain operators on the GPU: the same bits, and the time that each takes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.nn.functional import linear

from mmfsdp.core import quantize as q
from mmfsdp.params import FrozenDtype
from mmfsdp.quantized import int8, nf4
from tests.bench.gpu.device import DEVICE, ON_GPU, seconds_of, synchronize
from tests.bench.gpu.rows import Rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITWISE_SHAPES = ((9, 64), (9, 70), (33, 4992), (256, 11008))
"""Columns that a block divides, and that it does not."""
LAYERS = ((4096, 11008), (2048, 8192), (8192, 28672)) if ON_GPU else ((64, 256),)
"""Matrices of models of 7, 1 and 70 billion parameters."""
TOKENS = (2048, 4096) if ON_GPU else (16,)
UNITS = {"1 B": (2048, 512, 8192), "8 B": (4096, 1024, 14336)} if ON_GPU else {"tiny": (64, 64, 128)}
"""Width of a language model, of its keys and values, and of its MLP: a layer has seven matrices."""
COPIES = 4
"""Matrices that are dequantized in turn: the codes of one would stay in the GPU's cache."""


def kernel(rows: Rows) -> None:
    """Write rows of equal bits, then of times."""
    rows.attempt({"what": "fused kernel"}, describe_kernel)
    for form in (FrozenDtype.NF4, FrozenDtype.INT8):
        rows.attempt({"what": "same bits", "form": form.value}, partial(same_bits, form.load()))
    for rows_of_matrix, columns in LAYERS:
        if rows.seconds_left < 5:
            break
        matrices = [torch.randn(rows_of_matrix, columns, device=DEVICE).bfloat16() for _ in range(COPIES)]
        times_of_layer(rows, matrices)
    for size, widths in UNITS.items():
        # A launch for each matrix, then one for all of them, then the first again: the difference is the clock's drift.
        for launches in ("each", "one", "each again"):
            rows.attempt(
                {"unit of a model of": size, "launch": launches}, partial(time_unit, widths, launches == "one")
            )


def describe_kernel() -> dict[str, Any]:
    """Return whether triton compiles and runs the kernel here, and if not, why."""
    if not ON_GPU:
        return {"runs": "left out: on a GPU only"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused = nf4.fused_kernel.__wrapped__(DEVICE, torch.bfloat16)  # not what an earlier part was told
    if fused is None:
        raise RuntimeError(str(caught[-1].message))
    return {"runs": True}


def same_bits(form: q.Format) -> dict[str, Any]:
    """Compare codes, scales and matrices of the GPU with the CPU's, and fused with plain operators, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    row = {"codes and scales as on the CPU": True, "matrix as on the CPU": True, "fused as plain": True}
    for shape in BITWISE_SHAPES:
        for dtype in DTYPES:
            matrix = torch.randn(shape, generator=generator).to(dtype)
            codes, scales = form.quantize(matrix)  # `quantize` lets the rank's GPU do it
            on_device = q.quantize(matrix.to(DEVICE), form)
            same_codes = torch.equal(on_device[0].cpu(), codes) and torch.equal(on_device[1].cpu(), scales)
            row["codes and scales as on the CPU"] &= same_codes
            codes_here, scales_here = codes.to(DEVICE), scales.to(DEVICE)
            exact = q.dequantize(codes, scales, shape[1], dtype, form)
            whole = q.dequantize(codes_here, scales_here, shape[1], dtype, form)
            row["matrix as on the CPU"] &= torch.equal(whole.cpu(), exact)
            if form is nf4.FORMAT:
                plain = nf4.look_up(codes_here, scales_here, shape[1], nf4.PAIRS_OF[dtype].to(DEVICE))
                row["fused as plain"] &= torch.equal(whole, plain)
    if not all(row.values()):
        raise AssertionError(str(row))
    return row


def times_of_layer(rows: Rows, matrices: list[torch.Tensor]) -> None:
    """Write the times to dequantize matrices of one size by each way, and of products with them."""
    height, columns = matrices[0].shape
    name = f"{height} x {columns}"
    pairs = nf4.PAIRS_OF[torch.bfloat16].to(DEVICE)
    in_nf4 = [q.quantize(matrix, nf4.FORMAT) for matrix in matrices]
    in_int8 = [q.quantize(matrix, int8.FORMAT) for matrix in matrices]
    compiled = torch.compile(nf4.look_up, dynamic=False)
    ways: dict[str, tuple[list[Any], Callable[..., Any]]] = {
        "nf4 eager": (in_nf4, lambda codes, scales: nf4.look_up(codes, scales, columns, pairs)),
        "nf4 compiled": (in_nf4, lambda codes, scales: compiled(codes, scales, columns, pairs)),
        "nf4 as used": (in_nf4, lambda codes, scales: q.dequantize(codes, scales, columns, torch.bfloat16, nf4.FORMAT)),
        "int8 as used": (
            in_int8,
            lambda codes, scales: q.dequantize(codes, scales, columns, torch.bfloat16, int8.FORMAT),
        ),
    }
    if not ON_GPU:
        del ways["nf4 compiled"]  # it would compile for the CPU, which takes long and tells nothing
    for way, (stored, dequantize) in ways.items():
        rows.attempt({"matrix": name, "dequantize": way}, partial(time_dequantizing, stored, dequantize, columns))
    for tokens in TOKENS:
        about = {"matrix": name, "product with tokens": tokens}
        rows.attempt(about, partial(time_products, matrices, {"nf4": in_nf4, "int8": in_int8}, tokens))


def time_dequantizing(stored: list[Any], dequantize: Callable[..., Any], columns: int) -> dict[str, Any]:
    """Return milliseconds, and the bytes a second that are read (codes, scales) and written (bf16)."""
    codes, scales = stored[0]
    moved = codes.nbytes + scales.nbytes + 2 * len(codes) * columns
    turn = cycle(stored)
    seconds = seconds_of(lambda: dequantize(*next(turn)))
    return {"ms": seconds * 1e3, "GB/s": moved / seconds / 1e9}


def time_unit(widths: tuple[int, int, int], at_once: bool) -> dict[str, Any]:
    """Return the milliseconds in which a GPU dequantizes the matrices of a layer from nf4, and in which the host asks
    for it. at_once: by one launch. On a CPU only the ways that are used run."""
    width, keys, mlp = widths
    shapes = [(width, width), (keys, width), (keys, width), (width, width), (mlp, width), (mlp, width), (width, mlp)]
    stored = []
    for shape in shapes:
        codes, scales = q.quantize(torch.randn(shape, device=DEVICE).bfloat16(), nf4.FORMAT)
        stored.append((codes, scales, shape[1]))
    form, dtype = nf4.FORMAT, torch.bfloat16
    levels = nf4.LEVELS.to(DEVICE, dtype)

    def each() -> list[torch.Tensor]:
        return [q.dequantize(codes, scales, columns, dtype, form) for codes, scales, columns in stored]

    def one() -> list[torch.Tensor]:
        from tests.bench.gpu.unit_kernel import launch_unit  # it imports triton

        return launch_unit(stored, levels, nf4.BLOCK)

    dequantize = one if at_once and ON_GPU else each
    if not all(torch.equal(ours, exact) for ours, exact in zip(dequantize(), each(), strict=True)):
        raise AssertionError("the matrices differ")
    row = {"ms": seconds_of(dequantize) * 1e3}
    synchronize()
    start = time.perf_counter()
    for _ in range(10):
        dequantize()
    row["host ms"] = (time.perf_counter() - start) / 10 * 1e3
    synchronize()
    return row


def time_products(matrices: list[torch.Tensor], quantized: dict[str, list[Any]], tokens: int) -> dict[str, Any]:
    """Return the milliseconds of a product in bf16, and how many times as long those with quantized matrices take."""
    columns = matrices[0].shape[1]
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    turn = cycle(matrices)
    bf16 = seconds_of(lambda: linear(x, next(turn)))
    row = {"bf16 ms": bf16 * 1e3}
    for name, stored in quantized.items():
        turn_of_form, form = cycle(stored), FrozenDtype(name).load()
        seconds = seconds_of(lambda turn=turn_of_form, form=form: q.multiply(x, *next(turn), columns, form))
        row[f"{name} / bf16"] = seconds / bf16
    return row
