"""Quantize frozen matrices to 8 or 4 bits. They are stored, sharded and gathered as codes and scales; the forward and
backward of their module dequantize them when they use them.

A frozen matrix (rows, columns) becomes two frozen parameters with as many rows, which FSDP2 shards and gathers as it
does every other:

    int8  codes int8 (rows, columns)                    scales (rows, 1)
    nf4   codes uint8 (rows, columns / 2), two a byte   scales (rows, columns / 64), one for each block of 64 columns

A scale is the largest absolute value of its row or block. A weight is its scale times the level of its code: a number
from -1 to 1, evenly spaced in int8. In nf4 the 16 levels are close to each other near 0, where most weights are
(Dettmers et al. 2023, QLoRA, appendix E).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ..params import Backend, FrozenDtype, FSDPParams, ParamError
from .collectives import Progress, group_device
from .recompute import call_checkpointed
from .trace import need_gradient, tied_names

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
"""The same in each dtype of compute. Made here, once, since in a step they could be made of fake tensors."""
BOUNDARIES = (LEVELS[1:] + LEVELS[:-1]) / 2
"""Between two of them lie the numbers whose nearest level is the same."""
CELLS = 64
"""A number x from -1 to 1 lies in the cell (x + 1) * CELLS, cut to an integer. No cell has two boundaries in it."""
BOUNDARY_CELLS = ((BOUNDARIES + 1) * CELLS).long()
BELOW = (torch.arange(2 * CELLS + 1, device="cpu")[:, None] > BOUNDARY_CELLS).sum(dim=1).to(torch.uint8)
"""The number of boundaries below each cell: the code of a number there, up to the cell's own boundary."""
BOUNDARY_IN = torch.full((2 * CELLS + 1,), torch.inf, device="cpu").scatter(0, BOUNDARY_CELLS, BOUNDARIES)
"""The boundary in each cell, or infinity."""
CHUNK = 2**20
"""Weights that are quantized at a time."""
CODES, SCALES = "_codes", "_scales"
"""What the names of the two parameters add to the matrix's."""


# ---- numbers ----


def quantize(matrix: Tensor, form: FrozenDtype) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a matrix (rows, columns), each weight as its nearest level, where the matrix is.

    A rank with a GPU lets it quantize what lies on the CPU. Checkpoints hold checksums of the codes, so both must give
    the same bits. They do as long as this is not compiled: each operator is exact (absolute and largest values,
    comparisons, look-ups, a product with a power of two), or rounds once to the nearest fp32 number, as IEEE 754 asks
    of every device; and no result depends on the order of a sum.
    """
    device = group_device() if matrix.device.type == "cpu" else matrix.device
    parts = []
    # A few rows at a time: they stay in a CPU's cache, and a GPU needs little memory for them.
    for rows in matrix.split(len(matrix) if matrix.is_meta else max(1, CHUNK // matrix.shape[1])):
        parts.append(_quantize_rows(rows.to(device), form))
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes).to(matrix.device), torch.cat(scales).to(matrix.device)


def _quantize_rows(matrix: Tensor, form: FrozenDtype) -> tuple[Tensor, Tensor]:
    if form is FrozenDtype.INT8:
        scales = matrix.abs().amax(dim=1, keepdim=True)
        return (_divide(matrix, scales) * 127).round().to(torch.int8), scales
    numbers = F.pad(matrix, (0, -matrix.shape[1] % BLOCK)).view(len(matrix), -1, BLOCK)
    scales = numbers.abs().amax(dim=2)
    numbers = _divide(numbers, scales[:, :, None]).reshape(-1)  # from -1 to 1
    # A search among the boundaries would take five times as long. What is not a number gets the last code.
    cells = numbers.add(1).mul_(CELLS).nan_to_num_(2 * CELLS).int()
    above = numbers > BOUNDARY_IN.to(matrix.device).index_select(0, cells)
    codes = (BELOW.to(matrix.device).index_select(0, cells) + above).view(len(matrix), -1)
    # Two codes of 4 bits in a byte: the even columns' in its upper half.
    return codes[:, ::2] * 16 + codes[:, 1::2], scales


def _divide(matrix: Tensor, scales: Tensor) -> Tensor:
    return matrix.float() / scales.float().clamp(min=1e-30)  # a row of zeros has the scale 0


def dequantize(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix (rows, columns) in a floating-point dtype."""
    if has_torch_function((codes, scales)):  # so that a trace sees this as one function of two parameters
        return handle_torch_function(dequantize, (codes, scales), codes, scales, columns, dtype)
    if codes.dtype is torch.int8:
        return _dequantize_int8(codes, scales, dtype)
    if codes.is_cuda:
        return dequantize_on_gpu(codes, scales, columns, dtype)
    return _look_up(codes, scales, columns, PAIRS_OF[dtype].to(codes.device))


def _dequantize_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    steps = scales.float() / 127  # in fp32: rounded to bf16 it would change one weight in five
    if codes.is_cuda:
        # One kernel, which casts as it reads and writes. On a CPU it would first copy its operands to fp32.
        return torch.mul(codes, steps, out=torch.empty(codes.shape, dtype=dtype, device=codes.device))
    return codes.float().mul_(steps).to(dtype)


def _look_up(codes: Tensor, scales: Tensor, columns: int, pairs: Tensor) -> Tensor:
    """Dequantize nf4 by plain operators, in the dtype of pairs (256, 2)."""
    levels = F.embedding(codes.int(), pairs)  # (rows, columns / 2, 2)
    blocks = levels.view(len(codes), -1, BLOCK).mul_(scales.to(pairs.dtype)[:, :, None])
    return blocks.view(len(codes), -1)[:, :columns]


@torch.library.custom_op("mmfsdp::dequantize_nf4", mutates_args=())
def dequantize_on_gpu(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix (rows, columns) of nf4 codes on a GPU.

    torch takes this as one operator, which it does not look into: neither torch.compile nor fake tensors.
    """
    fused = _fused_kernel(codes.device, dtype)
    if fused is None:
        return _look_up(codes, scales, columns, _on_gpu(PAIRS, codes.device, dtype)).contiguous()
    levels = _on_gpu(LEVELS, codes.device, dtype)
    return fused(codes.contiguous(), scales.to(dtype).contiguous(), levels, columns, BLOCK)


@dequantize_on_gpu.register_fake
def _(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(len(codes), columns, dtype=dtype)


@cache  # a copy to a GPU waits for it
def _on_gpu(table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return table.to(device, dtype)


@cache  # the first launch compiles it
def _fused_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor] | None:
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


def multiply(x: Tensor, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Return x (..., columns) times the transposed matrix, as `F.linear` does."""
    if has_torch_function((x, codes, scales)):  # as above
        return handle_torch_function(multiply, (x, codes, scales), x, codes, scales, columns)
    return _Multiply.apply(x, codes, scales, columns)


class _Multiply(torch.autograd.Function):
    """Keeps codes and scales for backward, and dequantizes them again there.

    Autograd would keep the dequantized matrix of every layer from forward to backward: more than without quantization.
    What is kept here are the unit's parameters, which FSDP2 frees after forward and gathers again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, columns: int) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.columns = columns
        return F.linear(x, dequantize(codes, scales, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scales = ctx.saved_tensors
        return gradient @ dequantize(codes, scales, ctx.columns, gradient.dtype), None, None, None


# ---- modules ----


class QuantizedLinear(nn.Linear):
    """A Linear, or a Conv1D of GPT-2, with the codes and scales of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features) of x (..., in_features), in the dtype of x."""
        if torch.is_autocast_enabled(x.device.type):  # DDP's mixed precision; autocast does not see into _Multiply
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = multiply(x, self.weight_codes, self.weight_scales, self.in_features)  # type: ignore[arg-type]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the matrix (out_features, in_features), dequantized, for whoever reads it outside of forward."""
        return dequantize(self.weight_codes, self.weight_scales, self.in_features, self.weight_scales.dtype)  # type: ignore


class QuantizedAttention(nn.MultiheadAttention):
    """torch's attention, with the codes and scales of the packed projection of queries, keys and values."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute attention as torch does. Backward computes it again: autograd would keep the dequantized matrices."""
        if torch.is_grad_enabled() and need_gradient((args, kwargs)):
            return call_checkpointed(super().forward, *args, **kwargs)
        return super().forward(*args, **kwargs)

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """Return the matrix (3 * embed_dim, embed_dim), dequantized."""
        codes, scales = self.in_proj_weight_codes, self.in_proj_weight_scales
        return dequantize(codes, scales, self.in_features, scales.dtype)  # type: ignore[arg-type]


def matrices(model: nn.Module, fsdp: FSDPParams) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, its key for it) of each matrix to quantize: frozen, of a Linear, Conv1D or packed attention.

    Not those that are tied, nor heads, nor what `not_quantized` names. Raises ParamError for a pattern of it that
    matches no matrix.
    """
    stays: set[Any] = set()
    for names in tied_names(model).values():
        stays.update(names)
    unmatched = set(fsdp.not_quantized)
    module: Any
    # Heads stay as loaded: their error would go straight into the logits.
    for module in model.modules():
        if hasattr(module, "get_output_embeddings") and isinstance(module.get_output_embeddings(), nn.Module):
            stays.update(module.get_output_embeddings().modules())
    for path, module in model.named_modules():
        key = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
        matrix, name = module._parameters.get(key), f"{path}.{key}".lstrip(".")
        # A subclass with a forward of its own may do anything with its matrix.
        known = type(module).forward in (nn.Linear.forward, nn.MultiheadAttention.forward) or is_transposed(module)
        if matrix is None or matrix.requires_grad or not known or stays & {module, name}:
            continue
        patterns = {pattern for pattern in fsdp.not_quantized if fnmatchcase(name, pattern)}
        unmatched -= patterns
        if not patterns:
            yield name, module, key
    if unmatched:
        raise ParamError("not_quantized", f"{min(unmatched)!r} matches no frozen matrix; correct or remove it")


def is_transposed(module: nn.Module) -> bool:
    """Return True for the Conv1D of transformers, which core does not import: a Linear with its matrix transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def quantize_model(model: nn.Module, fsdp: FSDPParams, progress: Progress = str) -> dict[str, bool]:
    """Quantize the frozen matrices in place, one by one, if `frozen_dtype` says so; what is quantized already stays.

    Return, by name, whether each matrix that was quantized now was transposed before.
    """
    form, transposed = fsdp.frozen_dtype, {}
    if form is None or not form.quantizes:
        return {}
    check_versions(fsdp)
    module: Any
    for name, module, key in list(matrices(model, fsdp)):
        progress(name)
        matrix = module._parameters.pop(key).detach()
        transposed[name] = is_transposed(module)
        if transposed[name]:
            matrix = matrix.T
        codes, scales = quantize(matrix, form)
        module.register_parameter(key + CODES, nn.Parameter(codes, requires_grad=False))
        module.register_parameter(key + SCALES, nn.Parameter(scales, requires_grad=False))
        module.out_features, module.in_features = matrix.shape
        module.__class__ = QuantizedAttention if isinstance(module, nn.MultiheadAttention) else QuantizedLinear
    return transposed


def check_versions(fsdp: FSDPParams) -> None:
    """Raise ParamError if this torch cannot shard integers."""
    if fsdp.effective_backend is Backend.FSDP2 and torch.__version__ < "2.12":  # compares as versions do
        raise ParamError(
            "frozen_dtype",
            f"{fsdp.frozen_dtype} needs torch 2.12 or newer with FSDP2, which shards no integers in torch "
            f"{torch.__version__}; update torch, or set frozen_dtype to bf16",
        )


def count_weights(model: nn.Module, name: str, p: nn.Parameter) -> int | None:
    """Return the number of weights that codes stand for, 0 for scales, None for a parameter that is not quantized."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, (QuantizedLinear, QuantizedAttention)) or matrix_name(name) == name:
        return None
    return len(p) * owner.in_features if name.endswith(CODES) else 0  # type: ignore


def matrix_name(parameter: str) -> str:
    """Return the name of the matrix that codes or scales belong to; other names unchanged."""
    return parameter.removesuffix(CODES).removesuffix(SCALES)
