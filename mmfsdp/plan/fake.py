"""Models and operators without storage: torch's fake tensors, asked once for each kind of call."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
KEPT = 20_000
"""Kinds of calls that are kept."""


def fake_mode() -> FakeTensorMode:
    """Where tensors have shapes only."""
    # Without a GPU the mode pretends to 8, and the next backward would start a thread for each: these may meet the end
    # of Python 3.11 and abort ("terminate called without an active exception"). What has started once starts no more.
    torch.ones(1, requires_grad=True).backward()
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    formats: Mapping[str, torch.dtype] = MappingProxyType({}),
    buffers: torch.dtype | None = None,
) -> nn.Module:
    """A copy whose parameters and buffers have shapes but no storage. formats: of parameters, by first name; and of
    buffers, where not their own."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters():
        memo[id(p)] = made = fake(p, mode, formats.get(name)).requires_grad_(p.requires_grad)
        made._is_param = True  # type: ignore[attr-defined]  # as nn.Parameter does, which copies it first
    modules = list(model.modules())
    for b in (b for module in modules for b in module._buffers.values() if b is not None):
        memo[id(b)] = fake(b, mode, buffers if b.is_floating_point() else None)
    for module in modules:
        if all(getattr(type(module), name, None) == getattr(nn.Module, name, None) for name in _COPIES):
            memo[id(module)] = type(module).__new__(type(module))
    for module in modules:  # as deepcopy does, in half of the time
        if id(module) in memo:
            vars(memo[id(module)]).update((key, _copied(v, memo)) for key, v in vars(module).items())
    return copy.deepcopy(model, memo)


_COPIES = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__", "__slots__"),
)
"""What a module may have to be copied in its own way."""


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _VALUES:
        return value
    if type(value) in (dict, OrderedDict, set) and not value:
        return memo.setdefault(id(value), type(value)())  # several modules may share it
    return copy.deepcopy(value, memo)


def fake(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of that shape without storage."""
    shape = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
    return FakeTensor(mode, shape, CPU)  # as under the mode, in a third of the time


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested collections; what torch gives and takes is most often a tensor, or flat."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (tuple, list):
        return [t for v in value for t in tensors_of(v)]
    return [] if type(value) in _VALUES else [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


class Made(NamedTuple):
    """A tensor that an operator returns."""

    alias: int | None
    """Which of its arguments' storages it shares; None for one of its own."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Kind:
    """Calls of an operator with arguments alike."""

    def __init__(self, collection: type | None = None, parts: Sequence[Made | int | None] = ()):
        self.collection, self.parts = collection, parts
        """What they return: a tuple, a list, or None for its only part."""
        self.notes: dict[Any, Any] = {}
        """What others know of them."""


class FakeOperators(TorchDispatchMode):
    """Runs operators on the tensors of a mode, which is asked once for each kind of call: that takes it 0.1 ms, and
    layers repeat. What does more than make tensors by its arguments' shapes is the mode's each time."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self._state = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), CPU)))
        self._known = _known.setdefault(torch.get_default_dtype(), {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to ask each time takes as long as the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # two of three calls
            return args[0].fake_device
        return self.run(func, args, kwargs or {})[0]

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Kind]:
        """What an operator returns, and the kind of call."""
        tensors: list[Any] = []
        with torch._C.DisableTorchFunction():
            key = self._key(func, args, kwargs, tensors)
            if (kind := self._known.get(key)) is not None:
                return self._made(kind, tensors), kind
        out = func(*args, **kwargs)
        if key is None:
            return out, Kind()
        with torch._C.DisableTorchFunction():
            kind = self._kind(out, tensors)
        if kind is not None:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = kind
        return out, kind or Kind()

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Hashable:
        if func not in _pure:
            _pure[func] = _is_pure(func)
        if not _pure[func]:
            return None
        try:
            parts = _described(args, tensors)
            if kwargs:
                parts = *parts, *kwargs, _described(kwargs.values(), tensors)
        except _Unlike:
            return None
        return (func, *parts) if tensors else None

    def _kind(self, out: Any, tensors: list[Any]) -> Kind | None:
        """None where the next such call may return something else."""
        kind = Kind(type(out) if type(out) in (tuple, list) else None)
        storages = [t.untyped_storage()._cdata for t in tensors]
        parts: list[Made | int | None] = []
        for t in out if kind.collection else (out,):
            if t is None or type(t) is int:
                parts.append(t)
                continue
            if type(t) is not FakeTensor or not _plain(t) or t.requires_grad or any(t is given for given in tensors):
                return None
            storage = t.untyped_storage()
            alias = storages.index(storage._cdata) if storage._cdata in storages[: len(tensors)] else None
            parts.append(Made(alias, t.shape, t.stride(), int(t.storage_offset()), t.dtype))
            if alias is None:
                again = self._made(Kind(None, parts[-1:]), ())
                if storage._cdata in storages or again.untyped_storage().nbytes() != storage.nbytes():
                    return None
                storages.append(storage._cdata)
        kind.parts = parts
        return kind

    def _made(self, kind: Kind, tensors: Sequence[Any]) -> Any:
        with torch._C._DisableTorchDispatch():
            parts = [self._tensor(made, tensors) if type(made) is Made else made for made in kind.parts]
        return kind.collection(parts) if kind.collection else parts[0]

    def _tensor(self, made: Made, tensors: Sequence[Any]) -> torch.Tensor:
        alias, size, stride, offset, dtype = made
        if alias is None:
            shape = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        else:
            shape = torch.empty(0, dtype=dtype, device="meta")
            shape.set_(tensors[alias].untyped_storage(), offset, size, stride)
        # As FakeTensor() does, in a quarter of the time.
        t = torch.Tensor._make_subclass(FakeTensor, shape, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(t)
        vars(t).update(self._state)
        return t


class _Unlike(Exception):
    """An argument that more than its shape matters of."""


_DEVICE = torch.ops.prim.device.default
_IMPURE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_known: dict[torch.dtype, dict[Hashable, Kind]] = {}
_pure: dict[Any, bool] = {}


def _is_pure(func: Any) -> bool:
    """True if shapes tell all that an operator does."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return False
    lifts = "lift" in func._schema.name
    return not lifts and not _IMPURE & set(func.tags)


def _plain(t: Any) -> bool:
    odd = t.constant is not None or t.dtype.is_complex or t.is_neg()
    return not odd and t.layout is torch.strided and t.fake_device == CPU


def _described(values: Iterable[Any], tensors: list[Any]) -> tuple[Any, ...]:
    """Shapes of tensors, which are collected; other values with their types, since 1, 1.0 and True are equal."""
    parts: list[Any] = []
    for v in values:
        kind = type(v)
        if kind is FakeTensor:
            if not _plain(v):
                raise _Unlike
            tensors.append(v)
            parts.append((v.shape, v.stride(), v.storage_offset(), v.dtype, v.requires_grad))
        elif kind in (list, tuple):
            parts.append(_described(v, tensors))
        elif kind in _VALUES:
            parts += kind, v
        else:
            raise _Unlike
    return tuple(parts)


_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
