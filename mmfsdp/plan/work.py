"""What a step computes: operations and bytes of each kernel, from a run on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..params import Backend
from .checkpointing import checkpoint_activations
from .trace import fake, fake_copy, fake_mode
from .units import WrapPlan


@dataclass(frozen=True)
class Work:
    """The kernels of one micro-step's forward and backward, in order."""

    kernels: tuple[tuple[int, int], ...]
    """(floating-point operations of matrix products, bytes read and written) of each."""

    @property
    def flops(self) -> int:
        """Operations of matrix products: no more than the mix of frozen and trainable needs, but for recomputing."""
        return sum(flops for flops, _ in self.kernels)

    def seconds(self, *, flops: float, memory: float, call: float = 0.0) -> float:
        """How long they take one after the other, each bound by arithmetic (flops per second), by memory (bytes per
        second) or by its call (seconds): the roofline of Williams et al., 2009."""
        return sum(max(f / flops, b / memory, call) for f, b in self.kernels)


def work_of(model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> Work:
    """What one micro-step of a model that is not wrapped computes, in the plan's formats, on one rank.

    example: keyword arguments of a forward, of any device and without need of values. Raises ValueError where the model
    does not take it.
    """
    mode, precision = fake_mode(), plan.fsdp.mixed_precision
    dtype = precision.to_torch() if precision else None
    autocast = dtype if plan.backend is Backend.DDP else None
    cast = None if autocast else dtype
    twin = fake_copy(model, mode, {p.name: cast or getattr(torch, p.dtype) for u in plan.units for p in u.params})
    twin.train()
    inputs = tree_map(lambda v: _fake(v, mode, cast) if isinstance(v, torch.Tensor) else v, example)
    checkpoint_activations(twin, plan)
    counter = _Counter()
    try:
        with mode, counter:
            with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                loss = twin(**inputs).loss
            loss.backward()
    except Exception as error:
        raise ValueError(f"example: the model's step failed on it ({type(error).__name__}: {error})") from error
    return Work(tuple(counter.kernels))


def _fake(tensor: torch.Tensor, mode: Any, dtype: torch.dtype | None) -> torch.Tensor:
    return fake(tensor, mode, dtype if tensor.is_floating_point() else None)


class _Counter(TorchDispatchMode):
    """Takes down what each operator costs that makes or fills a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        held = {t.untyped_storage()._cdata for t in given}
        writes = func._schema.is_mutable or any(t.untyped_storage()._cdata not in held for t in made)
        if writes and not func._overloadpacket.__name__.startswith(("empty", "new_empty", "detach")):
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            self.kernels.append((flops, sum(t.nbytes for t in [*given, *made])))
        return out


def _tensors(values: Any) -> Sequence[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
