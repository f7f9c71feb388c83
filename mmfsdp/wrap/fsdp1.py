"""A plan applied as FSDP1: one FullyShardedDataParallel per unit, inner ones first."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from ..params import ParamError, Precision
from ..plan import Unit, WrapPlan
from ..plan.build import torch_dtype
from .fsdp2 import _depth
from .replicated import replicated_params, serve_replicated
from .rest import serve_generate
from .start import Source, fill


def wrap_fsdp1(
    model: nn.Module, plan: WrapPlan, *, device: torch.device, mesh: DeviceMesh, weights: Source | None
) -> nn.Module:
    """Replace the units inside by wrapped ones; returns the wrapped model. Raises ParamError to offload from a CPU.

    With `weights`, each unit is whole just before it is sharded, and no other then is.
    """
    if plan.fsdp.cpu_offload and device.type == "cpu":
        raise ParamError("cpu_offload", "FSDP1 offloads from CUDA only; set it to false or backend to FSDP2")
    if weights is not None:
        replicated = {p.name for unit in plan.units if not unit.sharded for p in unit.params}
        fill(model, weights, replicated.__contains__, device=device)
    whole = list(replicated_params(model, plan))
    serve_replicated(model, plan, device)
    shared: dict[str, Any] = {
        "device_mesh": mesh,
        "device_id": device,
        "cpu_offload": CPUOffload(offload_params=True) if plan.fsdp.cpu_offload else None,
        "use_orig_params": plan.fsdp.use_orig_params is not False,
        "forward_prefetch": plan.fsdp.forward_prefetch,
        "ignored_states": whole,
    }
    sharded = [unit for unit in plan.units if unit.sharded]
    for unit in sorted(sharded, key=_depth, reverse=True):
        (name,) = unit.modules
        if weights is not None:
            fill(model, weights, partial(_is_in, name), device=device)
        wrapped = FullyShardedDataParallel(model.get_submodule(name), **shared, **_own(unit, plan))
        if not name:
            if hasattr(model, "generate"):
                serve_generate(wrapped, partial(_generate, wrapped, plan, device))
            return wrapped
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, wrapped)
    raise AssertionError("every plan has a root unit")


def _generate(
    wrapped: FullyShardedDataParallel, plan: WrapPlan, device: torch.device, *args: Any, **kwargs: Any
) -> Any:
    """What the root holds is there throughout, as its forward, which is not called, would have it, but in fp32."""
    mixed = plan.fsdp.mixed_precision
    with (
        FullyShardedDataParallel.summon_full_params(wrapped, recurse=False, writeback=False),
        torch.autocast(device.type, mixed.to_torch() if mixed else None, enabled=mixed not in (None, Precision.FP32)),
    ):
        return wrapped.module.generate(*args, **kwargs)  # type: ignore[operator]


def _is_in(module: str, name: str) -> bool:
    return name.startswith(f"{module}.") or not module


def _own(unit: Unit, plan: WrapPlan) -> dict[str, Any]:
    """Constructor arguments that differ between units."""
    before = [u for u in plan.units if u.sharded and u.params and u.ends < unit.ends]
    # Prefetch asks no questions: after a unit that backward never enters, there must be none.
    wasted = before and not max(before, key=lambda u: u.ends).grad_flow
    return {
        "sharding_strategy": _strategy(unit, hybrid=plan.replicate > 1),
        "backward_prefetch": None if wasted else plan.fsdp.backward_prefetch.to_torch(),
        "mixed_precision": MixedPrecision(
            param_dtype=torch_dtype(unit.compute_dtype) if unit.compute_dtype else None,
            reduce_dtype=plan.fsdp.reduce_dtype.to_torch(),
            cast_forward_inputs=bool(unit.compute_dtype),
            cast_root_forward_inputs=plan.fsdp.mixed_precision is not None,
        ),
    }


def _strategy(unit: Unit, *, hybrid: bool) -> ShardingStrategy:
    if unit.reshard_after_forward:
        return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
