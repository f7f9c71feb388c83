"""Fake tensors: a model's parameters without memory, under which operators compute shapes only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def fake_mode() -> FakeTensorMode:
    """Return a mode under which operators compute shapes only."""
    # Without a GPU the mode pretends to have 8, and the next backward would start a thread for each of them, which can
    # abort Python 3.11 at exit ("terminate called without an active exception"). Autograd starts its threads only once,
    # so a backward outside of the mode starts the real ones first.
    torch.ones(1, requires_grad=True).backward()
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(
    model: nn.Module,
    mode: FakeTensorMode,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    buffer_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return a copy whose parameters and buffers are fake tensors on the CPU, wherever the model's are.

    dtypes: of parameters, by first name; others keep theirs. buffer_dtype: of floating-point buffers.
    """

    def fake(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake_tensor(tensor, mode, dtypes.get(name)), requires_grad=tensor.requires_grad)
        return fake_tensor(tensor, mode, buffer_dtype if tensor.is_floating_point() else None)

    return copy_with(model, fake)


def copy_with(model: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a model with other tensors; tied ones stay tied.

    replace: given a parameter or buffer and its first name, returns what stands in its place in the copy; where it
    returns the tensor itself, that is copied.
    """
    memo: dict[int, Any] = {}  # deepcopy puts these in the place of the originals
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        other = replace(name, tensor)
        if other is not tensor:
            memo[id(tensor)] = other
    return copy.deepcopy(model, memo)


def copy_inputs(example: dict[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    """Return keyword arguments with a copy of each tensor, on the CPU; fake tensors for those without values."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta or isinstance(value, FakeTensor):
            return fake_tensor(value, mode)
        return value.detach().cpu().clone()

    return tree_map(copied, example)


class RealValues(TorchDispatchMode):
    """Compute with real values every tensor that depends on no parameter: masks, positions, grids, numbers of tokens.

    Models read such tensors as numbers to decide on shapes. As soon as one operand is fake, the result is fake.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, getattr(func, "_overloadpacket", None)
        if operator is ASK_DEVICE:  # most calls of a forward
            return CPU
        tensors = tensors_of((args, kwargs))
        if operator is aten._grouped_mm and tensors[0].dtype is torch.float32:
            return grouped_mm_output(*args, **kwargs)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if operator in INDEXING:
                # Fake tensors do not know how many elements a mask selects, even if the mask itself has values.
                args = (args[0], places(args[1]), *args[2:])
            return func(*args, **kwargs)
        if not tensors:
            # Made out of nothing. Whole numbers may become positions; floats may be large, and stay fake.
            fake = func(*args, **kwargs)
            if operator is not aten.arange and any(tensor.is_floating_point() for tensor in tensors_of(fake)):
                return fake
        with unset_fake_temporarily():
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **kwargs)
            # Planning leaves the generator of torch as it is. It is that of all threads, and the cell of a notebook may
            # draw from it while a thread plans: so only for one operator are states taken and given back.
            with torch.random.fork_rng(devices=()):
                return func(*args, **kwargs)


aten = torch.ops.aten
ASK_DEVICE, CPU = torch.ops.prim.device, torch.device("cpu")
INDEXING = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def grouped_mm_output(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """Return a tensor without values, as large as the products of groups of rows of a and matrices of b, in fp32.

    In torch 2.14 the kernels take fp32, but the shapes of fake tensors are worked out for bf16 only. 2.15 does both.
    Raises ValueError for matrices that the kernels do not take.
    """
    for matrix in (a, b):
        if max(matrix.stride()[-2:]) % 4:
            raise ValueError(f"grouped_mm takes rows of a multiple of 16 bytes, not {tuple(matrix.shape)} in fp32")
    groups: list[int] = []
    if a.dim() == b.dim():  # one product a group: the groups are matrices of a and b, or columns of a and rows of b
        groups = [len(a) if a.dim() == 3 or offsets is None else len(offsets)]
    columns = b.shape[-1]
    # Its rows are padded to 16 bytes (_meta_registrations.py, _create_grouped_mm_output_tensor).
    padded = a.new_empty(*groups, a.shape[-2], columns + -columns % 4)
    return padded[..., :columns]


def places(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices with the places of a mask instead of it: the result's shape is known then."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of that shape without storage."""
    with mode:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested collections."""
    tensors: list[torch.Tensor] = []
    _collect_tensors(value, tensors)
    return tensors


def _collect_tensors(value: Any, tensors: list[torch.Tensor]) -> None:
    # A recording asks several times for each operator. The arguments of most are tuples of tensors and numbers, for
    # which torch's walk of any registered class takes four times as long.
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif type(value) in (tuple, list):
        for each in value:
            _collect_tensors(each, tensors)
    elif type(value) is dict:
        for each in value.values():
            _collect_tensors(each, tensors)
    elif type(value) not in WITHOUT_TENSORS:
        tensors += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


WITHOUT_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout})
