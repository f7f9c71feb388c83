"""Apply a plan with FSDP1: one FullyShardedDataParallel per unit, inner units first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from ..core.group import common_module, inner_units_first, owning_groups
from ..core.names import ancestors, tied_names
from ..core.plan import Unit, UnitKind, WrapPlan
from ..core.trace import Trace
from ..core.units import assign_parameters, torch_dtype
from ..core.wrapper import Fill, Wrapper
from ..params import FSDPParams, ParamError, Precision


class FSDP1Wrapper(Wrapper):
    """Wraps with FullyShardedDataParallel."""

    def groups(self, model: nn.Module, groups: list[list[str]], trace: Trace) -> tuple[list[list[str]], set[str]]:
        """Return groups of one module each, and the names of parameters that cannot be sharded."""
        return split_groups(model, groups, trace)

    def trained_too(
        self, model: nn.Module, params: FSDPParams, groups: list[list[str]], replicated: set[str], trace: Trace
    ) -> list[str]:
        """Return the parameters of mixed units: FSDP1 makes one of a unit's, and computes gradients of all of it."""
        names: list[str] = []
        for _, members in assign_parameters(model, params, groups, replicated, trace):
            if UnitKind.of(p.trainable for p in members) is UnitKind.MIXED:
                names += [p.name for p in members if p.is_floating]
        return names

    def wrap(
        self,
        model: nn.Module,
        plan: WrapPlan,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        replicated: set[nn.Parameter],
        fill: Fill,
    ) -> nn.Module:
        """Replace each unit's module by a wrapper; see `wrap_fsdp1`."""
        return wrap_fsdp1(model, plan, device=device, mesh=mesh, replicated=replicated, fill=fill)

    def generate(
        self, wrapped: nn.Module, model: nn.Module, plan: WrapPlan, device: torch.device
    ) -> Callable[..., Any]:
        """Return a `generate` that gathers the root's own parameters; see the function of that name."""
        return partial(generate, wrapped, plan, device)


def wrap_fsdp1(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device: torch.device,
    mesh: DeviceMesh,
    replicated: set[nn.Parameter],
    fill: Fill,
) -> nn.Module:
    """Replace each unit's module by a wrapper. Returns the wrapper around the model.

    replicated: parameters that FSDP leaves whole. fill: fills modules on the meta device. Raises ParamError for
    cpu_offload without a GPU.
    """
    if plan.fsdp.cpu_offload and device.type == "cpu":
        raise ParamError("cpu_offload", "FSDP1 offloads from CUDA only; set it to false or backend to FSDP2")
    for unit in inner_units_first(plan):
        (name,) = unit.modules  # FSDP1 wraps one module at a time, so the planner makes no larger units for it
        fill(unit.modules)
        wrapped = FullyShardedDataParallel(
            model.get_submodule(name),
            sharding_strategy=sharding_strategy(unit, hybrid=plan.replicate > 1),
            mixed_precision=mixed_precision(unit, plan),
            backward_prefetch=backward_prefetch(unit, plan),
            forward_prefetch=plan.fsdp.forward_prefetch,
            cpu_offload=CPUOffload(offload_params=True) if plan.fsdp.cpu_offload else None,
            # True keeps each parameter's own name and requires_grad, which a mixed unit needs.
            use_orig_params=plan.fsdp.use_orig_params is not False,
            ignored_states=list(replicated),  # whole on every rank: neither sharded nor gathered
            device_mesh=mesh,
            device_id=device,
        )
        if name:
            # Unlike FSDP2, FSDP1 is a module around the module: put it in its place.
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, wrapped)
    return wrapped  # the last: the root's, around the model itself


def split_groups(model: nn.Module, groups: list[list[str]], trace: Trace) -> tuple[list[list[str]], set[str]]:
    """FSDP1: make each module a group, since a unit is one module, and see to tied parameters.

    A trainable one gets the innermost module around all its places. A frozen one is replicated: its names are returned.
    """
    split: list[list[str]] = []
    for group in groups:
        split += [[module] for module in group]
    replicated: set[str] = set()
    for first_name, names in tied_names(model).items():
        owners = owning_groups(names, split)
        if len(owners) == 1:
            continue
        if not model.get_parameter(first_name).requires_grad:
            # A unit around all its places would be mixed, and FSDP1 would reduce the frozen part as well.
            replicated.update(names)
            continue
        # The module around all its places may be a list, which has no forward.
        common = common_module(names)
        around = next(module for module in (common, *ancestors(common)) if not module or trace.calls[module])
        # The units of its places would each gather it, so one unit around them takes their part.
        split = [group for index, group in enumerate(split) if index not in owners]
        if around and [around] not in split:
            split.append([around])
    return split, replicated


def sharding_strategy(unit: Unit, *, hybrid: bool) -> ShardingStrategy:
    """Return FSDP1's strategy: by whether the unit is freed after forward, and whether its shards are replicated."""
    if hybrid and unit.reshard_after_forward:
        return ShardingStrategy.HYBRID_SHARD
    if hybrid:
        return ShardingStrategy._HYBRID_SHARD_ZERO2
    # FULL_SHARD is ZeRO-3, SHARD_GRAD_OP is ZeRO-2 (Rajbhandari et al. 2020).
    return ShardingStrategy.FULL_SHARD if unit.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


def mixed_precision(unit: Unit, plan: WrapPlan) -> MixedPrecision:
    """Return the unit's dtypes, as FSDP1 takes them."""
    return MixedPrecision(
        param_dtype=torch_dtype(unit.compute_dtype) if unit.compute_dtype else None,
        reduce_dtype=plan.fsdp.reduce_dtype.to_torch(),
        cast_forward_inputs=bool(unit.compute_dtype),
        cast_root_forward_inputs=plan.fsdp.mixed_precision is not None,
    )


def backward_prefetch(unit: Unit, plan: WrapPlan) -> Any:
    """Return FSDP1's BackwardPrefetch for the unit, or None.

    FSDP1 prefetches the unit that ended forward just before this one, even if backward never enters it. The gather
    would be wasted, and its memory freed only after backward.
    """
    earlier = [other for other in plan.sharded_units if other.forward_end < unit.forward_end]
    if earlier and not max(earlier, key=lambda other: other.forward_end).needed_in_backward:
        return None
    return plan.fsdp.backward_prefetch.to_torch()


def generate(wrapped: nn.Module, plan: WrapPlan, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Call `generate` of the model inside the wrapper.

    FSDP1 gathers the root's own parameters in the root's forward, which `generate` does not call: gather them here.
    They come in fp32, so autocast stands in for mixed precision.
    """
    precision = plan.fsdp.mixed_precision or Precision.FP32
    autocast = torch.autocast(device.type, dtype=precision.to_torch(), enabled=precision is not Precision.FP32)
    assert isinstance(wrapped, FullyShardedDataParallel)
    # writeback: nothing has changed the weights, so nothing is copied back to the shards.
    with FullyShardedDataParallel.summon_full_params(wrapped, recurse=False, writeback=False), autocast:
        return wrapped.module.generate(*args, **kwargs)  # type: ignore[operator]


WRAPPER = FSDP1Wrapper()
