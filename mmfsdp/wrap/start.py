"""Every rank starts from rank 0's weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..plan import WrapPlan
from ..plan.build import torch_dtype


class Source(Protocol):
    """What hands out rank 0's weights, each once. A dict is one."""

    def pop(self, name: str, default: None, /) -> torch.Tensor | None:
        """The weight of this name, for the last time."""


def weights_of(model: nn.Module, device: torch.device, weights: Source | None) -> Source | None:
    """Where rank 0's weights come from if any rank's model is on the meta device, as all then are; else None.

    Raises ValueError on every rank if rank 0's is and has no source, or a dict that does not fit.
    """
    here = any(t.is_meta for _, t in _tensors(model))
    wrong = _wrong(model, weights) if here and dist.get_rank() == 0 else None
    flag = torch.tensor([float(here) + bool(wrong)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag > 1:
        raise wrong or ValueError("weights: rank 0 does not have them; its error says more")
    if not flag:
        return None
    return weights if here and weights is not None else take_weights(model)


def _wrong(model: nn.Module, weights: Source | None) -> ValueError | None:
    """What a model on the meta device lacks on rank 0, if anything: later, other ranks would wait for it."""
    if weights is None:
        return ValueError("model: rank 0 has it on the meta device, and so nobody has weights; load them on rank 0")
    if not isinstance(weights, dict):
        return None
    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    here = {name: tuple(t.shape) for name, t in _tensors(model)}
    wrong = [name for name, shape in here.items() if shapes.get(name) != shape]
    if not wrong:
        return None
    name, there = wrong[0], shapes.get(wrong[0], "missing")
    return ValueError(
        f"weights: {len(wrong)} do not fit the model, such as {name}, which is {there} and {here[name]} in the model; "
        "give all parameters and buffers"
    )


def take_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move a model to the meta device and return what it held: weights on rank 0, nothing elsewhere."""
    held = {name: t.detach() for name, t in _tensors(model)} if dist.get_rank() == 0 else {}
    ties = _ties(model)
    model.to("meta")
    _tie(model, ties)
    return held


@torch.no_grad()
def copy_from_rank0(model: nn.Module, device: torch.device) -> None:
    """Overwrite each parameter and buffer with rank 0's."""
    if dist.get_world_size() == 1:
        return
    for _, tensor in _tensors(model):
        tensor.copy_(_sent(tensor, tensor.shape, tensor.dtype, device))


@torch.no_grad()
def hand_out(model: nn.Module, weights: Source, *, device: torch.device, via: torch.device) -> None:
    """Give a sharded model that is on the meta device storage on `device` and rank 0's weights, one tensor at a time.

    via: where the collectives run. A sharded parameter receives its part only.
    """
    ties = _ties(model)
    model.to_empty(device=device)
    _tie(model, ties)
    for name, tensor in _tensors(model):
        whole = _received(weights, name, tensor, via)
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        else:  # buffers, and what every rank holds whole: offloading is for shards
            tensor.data = tensor.data.to(via)
        tensor.copy_(whole)


@torch.no_grad()
def fill(model: nn.Module, weights: Source, wanted: Callable[[str], bool], *, device: torch.device) -> None:
    """Replace meta tensors by rank 0's on `device`, each by all its names: those of which a name is wanted."""
    called: dict[torch.Tensor, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if tensor.is_meta:
                called.setdefault(tensor, []).append(name)
    for tensor, names in called.items():
        if any(map(wanted, names)):
            whole = _received(weights, names[0], tensor, device)
            if isinstance(tensor, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
            for name in names:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, whole)


@torch.no_grad()
def cast_at_rest(model: nn.Module, plan: WrapPlan) -> None:
    """Give every parameter the dtype that the plan says it rests in, and buffers theirs."""
    for name, p in model.named_parameters():
        dtype = torch_dtype(plan.by_name[name].dtype)
        if p.dtype != dtype:
            p.data = p.data.to(dtype)
    if plan.fsdp.buffer_dtype:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(plan.fsdp.buffer_dtype.to_torch())


def _received(weights: Source, name: str, like: torch.Tensor, via: torch.device) -> torch.Tensor:
    return _sent(weights.pop(name, None) if dist.get_rank() == 0 else None, like.shape, like.dtype, via)


def _sent(tensor: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, via: torch.device) -> torch.Tensor:
    """Rank 0's tensor, on every rank."""
    if dist.get_rank() == 0:
        assert tensor is not None
        whole = tensor.to(device=via, dtype=dtype).contiguous()
    else:
        whole = torch.empty(shape, dtype=dtype, device=via)
    dist.broadcast(whole, 0)
    return whole


def _tensors(model: nn.Module):
    return chain(model.named_parameters(), model.named_buffers())


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """(first name, other name) of parameters and buffers that have several."""
    first: dict[int, str] = {}
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    names = [(first.setdefault(id(t), name), name) for name, t in named]
    return [(one, other) for one, other in names if one != other]


def _tie(model: nn.Module, ties: list[tuple[str, str]]) -> None:
    """A change of device makes two tensors of a tied one; make them one again."""
    for first, other in ties:
        (from_, _, key), (owner, _, leaf) = first.rpartition("."), other.rpartition(".")
        setattr(model.get_submodule(owner), leaf, getattr(model.get_submodule(from_), key))
