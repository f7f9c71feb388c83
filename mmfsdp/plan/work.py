"""The work of a step: its operators, each with what it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry


class Shape(NamedTuple):
    """A tensor among an operator's arguments."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Operator(NamedTuple):
    """Calls of one operator with arguments alike, and the work of each; see the plan's fields."""

    name: str
    """Within torch.ops."""
    args: tuple[Any, ...]
    """Tensors by their Shape."""
    kwargs: tuple[tuple[str, Any], ...]
    flops: int
    moved: int
    calls: int = 1


def operator_of(func: Any, args: Any, kwargs: Any, out: Any, made: int) -> Operator:
    """A call by what it was given and what it returned. made: bytes."""
    flops = moved = 0
    if count := flop_registry.get(func._overloadpacket):
        flops = count(*args, **kwargs, out_val=out)
    else:
        moved = made + sum(t.nbytes for t in args if isinstance(t, torch.Tensor))
    named = tuple((key, _shapes(value)) for key, value in kwargs.items())
    return Operator(str(func), _shapes(args), named, flops, moved)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Shape(value.shape, value.stride(), value.dtype)
    return tuple(map(_shapes, value)) if isinstance(value, (list, tuple)) else value
