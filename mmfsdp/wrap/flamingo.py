"""Flamingo.wrap_fsdp: FSDP1 with the caller's own arguments, in place, as OpenFlamingo wraps."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from .replicated import cast_floating
from .start import copy_from_rank0


def wrap_flamingo(model: nn.Module, wrapper_kwargs: dict[str, Any], device_id: torch.device) -> None:
    """See `Flamingo.wrap_fsdp`."""
    _refuse(model, wrapper_kwargs)
    if wrapper_kwargs.get("sync_module_states"):  # FSDP1 does so over GPUs only, and for what is in units
        copy_from_rank0(model, torch.device(device_id))
        wrapper_kwargs = {**wrapper_kwargs, "sync_module_states": False}
    for name in _units(model):
        parent, _, key = name.rpartition(".")
        # Twice, as in OpenFlamingo: the outermost of each keeps its weights gathered, so let that be one without any.
        inner = FullyShardedDataParallel(model.get_submodule(name), **{"device_id": device_id, **wrapper_kwargs})
        outer = FullyShardedDataParallel(inner, **{"device_id": device_id, **wrapper_kwargs})
        setattr(model.get_submodule(parent), key, outer)
    _serve_rest(model, device_id)


def _refuse(model: nn.Module, wrapper_kwargs: Any) -> None:
    """Raise ValueError where it is too late to wrap, or not said how."""
    if not isinstance(wrapper_kwargs, dict):
        raise ValueError(f"wrapper_kwargs: {wrapper_kwargs!r} is no dict of FullyShardedDataParallel's arguments")
    if any(isinstance(m, (FullyShardedDataParallel, FSDPModule)) for m in model.modules()):
        raise ValueError("wrap_fsdp: the model is wrapped already; call it once, on a model as it was built")
    mine = {id(p) for p in model.parameters()}
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    if any(id(p) in mine for o in optimizers for group in o.param_groups for p in group["params"]):
        raise ValueError(
            "wrap_fsdp: an optimizer has the parameters already, and would update none of the new ones; "
            "call wrap_fsdp first, then make the optimizer"
        )


def _units(model: nn.Module) -> list[str]:
    names = ["vision_encoder", "perceiver"]
    for i in range(len(model.layers)):  # type: ignore[arg-type]
        layer = f"language_model.{model.layers_name}.{i}"
        crosses = model.get_submodule(layer).cross_attention is not None
        names += [f"{layer}.cross_attention"] * crosses + [f"{layer}.decoder_layer"]
    return names


def _serve_rest(model: nn.Module, device: torch.device) -> None:
    """Move what is in no unit to the device, and keep what trains there the same on every rank."""
    rest = {n: m for n, m in model.named_modules() if "_fsdp_wrapped_module" not in n}
    rest = {n: m for n, m in rest.items() if not isinstance(m, FullyShardedDataParallel)}
    for p in {p for module in rest.values() for p in module.parameters(recurse=False) if p.requires_grad}:
        p.register_post_accumulate_grad_hook(_average)
    for module in rest.values():
        for p in module.parameters(recurse=False):
            p.data = p.data.to(device)
            # Units may give another format than these weights have.
            module.register_forward_pre_hook(
                lambda _, args, kwargs, dtype=p.dtype: cast_floating((args, kwargs), dtype), with_kwargs=True
            )
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))


def _average(p: torch.Tensor) -> None:
    assert p.grad is not None
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()
