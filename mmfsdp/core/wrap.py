"""Wrap a model as its plan says: start from rank 0's weights, prepare its modules, and wrap each unit."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..params.findings import stop_at_errors
from .collectives import Progress, group_device, no_progress
from .group import contains
from .guards import changed_since, check_order, refuse_changes, refuse_parts_first
from .inference import reshard_without_gradients, serve_generate
from .model_record import note_plan
from .plan import WrapPlan
from .precision import cast_batch_norms, cast_inputs
from .recompute import checkpoint_activations
from .shared_files import SharedFiles, share_files
from .units import torch_dtype
from .weights import Materializer, WeightSource, cast_at_rest, copy_from_rank0, quantize_weights, weight_source
from .wrapper import Fill, Wrapper


def apply_plan(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    weights: WeightSource | None = None,
    progress: Progress = no_progress,
) -> nn.Module:
    """Wrap a model as planned and start every rank from rank 0's weights. Every rank must call it.

    Args:
        model: The plain model, on the CPU or on `device`. Ranks other than 0 may have it on the meta device; they then
            hold at most their shards, one whole unit at a time, and replicated parameters.
        plan: Made for this model and this number of ranks.
        device: The device of this rank. Default: its current GPU with nccl, else the CPU.
        mesh: The mesh of the plan's ranks. Default: `make_mesh`.
        weights: Rank 0's weights, if rank 0 has the model on the meta device too: from `open_model`, or a dict. If all
            ranks see the files of `open_model`, each rank reads its own shards.
        progress: Called with the name of each tensor before it is quantized, and before ranks get it from rank 0.

    Returns:
        The wrapped model. FSDP2 wraps in place; DDP and FSDP1 return a wrapper.

    Raises:
        ValueError: If the lint of the plan has errors, if the model has changed since, if the mesh has another number
            of ranks, if nobody has the weights of a model on the meta device, or if a rank has damaged weights, or
            others than rank 0.
    """
    # The model may have changed since the plan was made.
    stop_at_errors((*plan.lint, *changed_since(model, plan)))
    device = torch.device(device or group_device())
    mesh = mesh or make_mesh(plan, device)
    if mesh.size() != plan.world_size:
        raise ValueError(f"mesh: has {mesh.size()} ranks but the plan was made for world_size {plan.world_size}")

    # 1. Every rank starts from the same weights, in the dtypes that they rest in.
    weights = quantize_weights(model, plan.fsdp, weight_source(model, device, weights), progress)
    files = share_files(getattr(weights, "places", {})) if weights is not None else SharedFiles({})
    cast_at_rest(model, plan)
    if weights is None and plan.fsdp.sync_module_states:
        copy_from_rank0(model, device, progress)

    # 2. These hook or replace `forward`, so they come first: the wrapper's hooks must run outside, once per forward.
    if not plan.memory_events and plan.rules.shards:  # made without an example
        check_order(model, plan)
    cast_batch_norms(model, plan.fsdp)
    compile_units(model, plan)
    checkpoint_activations(model, plan.fsdp)

    # 3. Wrap.
    fill = Materializer(model, weights or {}, files, device, progress)  # {}: nothing is on the meta device
    replicated = replicate_frozen(model, plan, device=device, fill=fill) if plan.rules.shards else set()
    wrapper: Wrapper = plan.backend.load()  # by default that of fsdp2.py
    wrapped = wrapper.wrap(model, plan, device=device, mesh=mesh, replicated=replicated, fill=fill)
    getattr(weights, "checksums", {}).update(fill.finish())
    reshard_without_gradients(wrapped)
    serve_generate(wrapped, model, plan, device)
    refuse_changes(wrapped, model, plan)
    refuse_parts_first(wrapped, plan)
    note_plan(wrapped, plan)
    return wrapped


def make_mesh(plan: WrapPlan, device: torch.device) -> DeviceMesh:
    """Return a mesh (dp_shard) or (dp_replicate, dp_shard): neighbors share a node, so shards stay within it."""
    if plan.replicate == 1 or not plan.rules.shards:
        return init_device_mesh(device.type, (plan.world_size,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device.type, (plan.replicate, plan.shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def replicate_frozen(model: nn.Module, plan: WrapPlan, *, device: torch.device, fill: Fill) -> set[nn.Parameter]:
    """Move the parameters of replicated units to the device and return them.

    Cast the inputs of their modules to the compute dtype, as FSDP does for sharded units.

    Args:
        model: The plain model.
        plan: Its plan.
        device: The device of this rank.
        fill: Fills parameters of these names that are on the meta device with rank 0's weights.
    """
    units = [unit for unit in plan.units if not unit.sharded and unit.params]
    names: list[str] = []
    for unit in units:
        names += [p.name for p in unit.params]
    fill(names)
    parameters = set()
    for name in names:
        parameter = model.get_parameter(name)
        # Through .data the Parameter stays the same object, so tied modules still share it.
        parameter.data = parameter.data.to(device)
        parameters.add(parameter)
    if plan.fsdp.mixed_precision:
        for unit in units:
            for name in unit.modules:
                cast = partial(cast_inputs, torch_dtype(unit.compute_dtype))
                model.get_submodule(name).register_forward_pre_hook(cast, with_kwargs=True)
    return parameters


def compile_units(model: nn.Module, plan: WrapPlan) -> None:
    """Compile the innermost units in place, if the plan says so. Hooks of the wrapper stay outside, uncompiled."""
    if not plan.fsdp.compile_units:
        return
    plan.fsdp.check_machine()
    for name in modules_to_compile(plan):
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


def modules_to_compile(plan: WrapPlan) -> list[str]:
    """Return the names of the modules of the innermost units, which `compile_units` compiles."""
    names: list[str] = []
    for unit in plan.units:
        if unit.params and not unit.is_root:
            names += unit.modules
    return [name for name in names if not contains([name], names)]
