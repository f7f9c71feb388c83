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

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import handle_torch_function, has_torch_function

from ..params import FSDPParams, ParamError
from .collectives import Progress, group_device, no_progress
from .fake_tensors import copy_with
from .names import tied_names
from .parameters import new_parameter
from .recompute import call_checkpointed
from .trace import need_gradient

CHUNK = 2**20
"""Weights that are quantized at a time."""
CODES, SCALES = "_codes", "_scales"
"""Ends of the names of the two parameters, after the matrix's."""


# ---- numbers ----


class Format(ABC):
    """A way to store a matrix in codes and scales. Each is an object in a file of its own, named in FrozenDtype.

    Both methods work on any device, and on the meta device.
    """

    @abstractmethod
    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of some rows (rows, columns); both have as many rows."""

    @abstractmethod
    def dequantize(self, codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the rows (rows, columns) in a floating-point dtype."""


def format_of(fsdp: FSDPParams) -> Format | None:
    """Return the format of quantized matrices; None where none is quantized."""
    if fsdp.frozen_dtype is None or not fsdp.frozen_dtype.quantizes:
        return None
    with unset_fake_temporarily():  # the first time it makes its tables
        form: Format = fsdp.frozen_dtype.load()
    return form


def relative(matrix: Tensor, scales: Tensor) -> Tensor:
    """Return a matrix over its scales in fp32, numbers from -1 to 1; a row of zeros has the scale 0."""
    return matrix.float() / scales.float().clamp(min=1e-30)


def quantize(matrix: Tensor, form: Format) -> tuple[Tensor, Tensor]:
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
        parts.append(form.quantize(rows.to(device)))
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes).to(matrix.device), torch.cat(scales).to(matrix.device)


def dequantize(codes: Tensor, scales: Tensor, columns: int, dtype: torch.dtype, form: Format) -> Tensor:
    """Return the matrix (rows, columns) in a floating-point dtype."""
    if has_torch_function((codes, scales)):  # so that a trace sees this as one function of two parameters
        return handle_torch_function(dequantize, (codes, scales), codes, scales, columns, dtype, form)
    return form.dequantize(codes, scales, columns, dtype)


def multiply(x: Tensor, codes: Tensor, scales: Tensor, columns: int, form: Format) -> Tensor:
    """Return x (..., columns) times the transposed matrix, as `F.linear` does."""
    if has_torch_function((x, codes, scales)):  # as above
        return handle_torch_function(multiply, (x, codes, scales), x, codes, scales, columns, form)
    return _Multiply.apply(x, codes, scales, columns, form)


class _Multiply(torch.autograd.Function):
    """Keeps codes and scales for backward, and dequantizes them again there.

    Autograd would keep the dequantized matrix of every layer from forward to backward: more than without quantization.
    What is kept here are the unit's parameters, which FSDP2 frees after forward and gathers again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, columns: int, form: Format) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.columns, ctx.form = columns, form
        return F.linear(x, dequantize(codes, scales, columns, x.dtype, form))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        codes, scales = ctx.saved_tensors
        return gradient @ dequantize(codes, scales, ctx.columns, gradient.dtype, ctx.form), None, None, None, None


# ---- modules ----


class QuantizedLinear(nn.Linear):
    """A Linear, or a Conv1D of GPT-2, with the codes and scales of its weight."""

    form: Format

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features) of x (..., in_features), in the dtype of x."""
        if torch.is_autocast_enabled(x.device.type):  # DDP's mixed precision; autocast does not see into _Multiply
            x = x.to(torch.get_autocast_dtype(x.device.type))
        codes, scales = self.weight_codes, self.weight_scales
        y = multiply(x, codes, scales, self.in_features, self.form)  # type: ignore[arg-type]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Return the matrix (out_features, in_features), dequantized, for code that reads it outside forward."""
        codes, scales = self.weight_codes, self.weight_scales
        return dequantize(codes, scales, self.in_features, scales.dtype, self.form)  # type: ignore[arg-type]


class QuantizedAttention(nn.MultiheadAttention):
    """torch's attention, with the codes and scales of the packed projection of queries, keys and values."""

    form: Format

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute attention as torch does. Backward computes it again: autograd would keep the dequantized matrices."""
        if torch.is_grad_enabled() and need_gradient((args, kwargs)):
            return call_checkpointed(super().forward, *args, **kwargs)
        return super().forward(*args, **kwargs)

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """Return the matrix (3 * embed_dim, embed_dim), dequantized."""
        codes, scales = self.in_proj_weight_codes, self.in_proj_weight_scales
        return dequantize(codes, scales, self.in_features, scales.dtype, self.form)  # type: ignore[arg-type]


def matrices(model: nn.Module, fsdp: FSDPParams) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, its key for it) of each matrix to quantize: frozen, of a Linear, Conv1D or packed attention.

    Skips tied matrices, output heads, and names that match `not_quantized`. Raises ParamError for a pattern of it that
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


def quantize_model(model: nn.Module, fsdp: FSDPParams, progress: Progress = no_progress) -> dict[str, bool]:
    """Quantize the frozen matrices in place, one by one, if `frozen_dtype` says so; what is quantized already stays.

    Return, by name, whether each matrix that was quantized now was transposed before.
    """
    transposed: dict[str, bool] = {}
    form = format_of(fsdp)
    if form is None:
        return transposed
    check_versions(fsdp)
    module: Any
    for name, module, key in list(matrices(model, fsdp)):
        progress(name)
        replaced = module._parameters.pop(key)
        matrix = replaced.detach()
        transposed[name] = is_transposed(module)
        if transposed[name]:
            matrix = matrix.T
        codes, scales = quantize(matrix, form)
        module.register_parameter(key + CODES, new_parameter(codes, like=replaced))
        module.register_parameter(key + SCALES, new_parameter(scales, like=replaced))
        module.out_features, module.in_features = matrix.shape
        module.form = form
        # The object stays, so that tied and registered references to it hold.
        module.__class__ = QuantizedAttention if isinstance(module, nn.MultiheadAttention) else QuantizedLinear
    return transposed


def quantized_copy(model: nn.Module, fsdp: FSDPParams) -> nn.Module:
    """Return the model as `quantize_model` makes it, without weights; itself if nothing is to be quantized."""
    if fsdp.frozen_dtype is None or not fsdp.frozen_dtype.quantizes:
        return model
    meta = copy_with(model, without_weight)
    quantize_model(meta, fsdp)
    return meta


def without_weight(_: str, tensor: Tensor) -> Tensor:
    """Return a parameter on the meta device in the place of another; a buffer as it is."""
    return new_parameter(tensor.detach().to("meta"), like=tensor) if isinstance(tensor, nn.Parameter) else tensor


def check_versions(fsdp: FSDPParams) -> None:
    """Raise ParamError if this torch cannot shard integers."""
    if fsdp.effective_backend.rules.by_parameter and torch.__version__ < "2.12":  # compares as versions do
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
