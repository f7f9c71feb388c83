"""Wrap a model as its plan says: with DDP here, with FSDP2 and FSDP1 in fsdp2.py and fsdp1.py."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..params import Backend, ParamError
from ..params.findings import stop_at_errors
from .collectives import Progress, group_device, rank
from .fsdp1 import wrap_fsdp1
from .fsdp2 import wrap_fsdp2
from .group import contains
from .inference import reshard_without_gradients, serve_generate
from .lint import frozen_later, lint, model_changed
from .model_record import note_plan
from .names import ancestors, plain_name
from .parameters import attributes_by_name, keep_attributes
from .plan import Unit, WrapPlan
from .precision import cast_inputs
from .recompute import checkpoint_activations, in_backward
from .trace import need_gradient
from .units import torch_dtype
from .weights import WeightSource, cast_at_rest, copy_from_rank0, materialize, quantize_weights, weight_source

# torch 2.13 deprecates `broadcast_buffers`, and with it warns in every run. Drop the old name with torch 2.12.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"
"""DDP's argument that keeps buffers equal to rank 0's in every forward."""


def apply_plan(
    model: nn.Module,
    plan: WrapPlan,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    weights: WeightSource | None = None,
    progress: Progress = str,
) -> nn.Module:
    """Wrap a model as planned and start every rank from rank 0's weights. Every rank must call it.

    model: on the CPU or on `device`. Ranks other than 0 may have it on the meta device; they then hold at most
    their shards and one whole unit at a time, and replicated parameters. FSDP2 wraps in place; DDP and FSDP1 return
    a wrapper.
    device: of this rank; default its current GPU with nccl, else the CPU. mesh: default `make_mesh`.
    weights: rank 0's, if rank 0 has the model on the meta device too (from `open_model`, or a dict).
    progress: called with the name of each tensor before it is quantized, and before ranks get it from rank 0.
    Raises ValueError if the lint finds errors, or if the plan was made for another number of ranks.
    """
    # Linted again: the model or the plan may have changed since it was made.
    stop_at_errors((*plan.lint, *lint(model, plan)))
    device = torch.device(device or group_device())
    mesh = mesh or make_mesh(plan, device)
    if mesh.size() != plan.world_size:
        raise ValueError(f"mesh: has {mesh.size()} ranks but the plan was made for world_size {plan.world_size}")

    # 1. Every rank starts from the same weights, in the dtypes that they rest in.
    weights = quantize_weights(model, plan.fsdp, weight_source(model, device, weights), progress)
    cast_at_rest(model, plan)
    if weights is None and plan.fsdp.sync_module_states:
        copy_from_rank0(model, device, progress)

    # 2. These hook or replace `forward`, so they come first: the wrapper's hooks must run outside, once per forward.
    if not plan.memory_events and plan.backend is not Backend.DDP:  # made without an example
        check_order(model, plan)
    cast_batch_norms(model, plan)
    compile_units(model, plan)
    checkpoint_activations(model, plan.fsdp)

    # 3. Wrap.
    attributes = attributes_by_name(model)
    fill = partial(materialize, model, weights or {}, device, progress)  # {}: nothing is on the meta device
    if plan.backend is Backend.DDP:
        fill([""])
        wrapped = wrap_ddp(model, plan, device=device, mesh=mesh)
    else:
        replicated = replicate_frozen(model, plan, device=device, fill=fill)
        wrap = wrap_fsdp1 if plan.backend is Backend.FSDP1 else wrap_fsdp2
        wrapped = wrap(model, plan, device=device, mesh=mesh, replicated=replicated, fill=fill)
    if plan.backend is Backend.FSDP2:
        keep_attributes(wrapped, attributes)
    reshard_without_gradients(wrapped)
    serve_generate(wrapped, model, plan, device)
    refuse_changes(wrapped, model, plan)
    refuse_parts_first(wrapped, plan)
    note_plan(wrapped, plan)
    return wrapped


def make_mesh(plan: WrapPlan, device: torch.device) -> DeviceMesh:
    """Return a mesh (dp_shard) or (dp_replicate, dp_shard): neighbors share a node, so shards stay within it."""
    if plan.replicate == 1 or plan.backend is Backend.DDP:
        return init_device_mesh(device.type, (plan.world_size,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device.type, (plan.replicate, plan.shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def wrap_ddp(model: nn.Module, plan: WrapPlan, *, device: torch.device, mesh: DeviceMesh) -> nn.Module:
    """Return the model inside DDP, with autocast for mixed precision: DDP's own is experimental."""
    model.to(device)
    # Autocast computes in 16 bits and leaves the weights in fp32.
    if plan.fsdp.autocast_precision:
        autocast = torch.autocast(device.type, dtype=plan.fsdp.autocast_precision.to_torch())
        model.forward = autocast(model.forward)  # type: ignore[method-assign]
    # As in FSDP: ranks start equal, then buffers are each rank's own.
    sync_buffers: dict[str, Any] = {SYNC_BUFFERS: False}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=mesh.get_group(0),
        init_sync=False,  # done above
        gradient_as_bucket_view=True,
        **sync_buffers,
    )


def replicate_frozen(
    model: nn.Module, plan: WrapPlan, *, device: torch.device, fill: Callable[[Sequence[str]], None]
) -> set[nn.Parameter]:
    """Move the parameters of replicated units to the device and return them.

    Cast the inputs of their modules to the compute dtype, as FSDP does for sharded units.
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


def check_order(model: nn.Module, plan: WrapPlan) -> None:
    """Have rank 0 warn, once and after a forward, of what a plan without an example assumed wrongly.

    Training is still correct: a unit that backward is found to pass through is gathered there.
    """
    began: dict[int, str] = {}  # names of units by their order in the plan, as they run
    passed: dict[str, None] = {}  # names of units that backward was not to pass through
    reported: list[str] = []

    def before_unit(unit: Unit, module: nn.Module, *inputs: Any) -> None:
        if in_backward():  # it runs again, in another order
            return
        began.setdefault(unit.order, unit.name)
        if unit.params and not unit.grad_flow and need_gradient(inputs):
            passed[unit.name] = None
            if isinstance(module, FSDPModule):
                module.set_unshard_in_backward(True)

    def after_model(*_: Any) -> None:
        problems = []
        if list(began) != sorted(began):
            problems.append(f"units ran in the order {', '.join(list(began.values())[:3])}, ...")
        if passed:
            problems.append("backward passes through " + ", ".join(passed))
        began.clear()
        if problems and not reported and rank() == 0:
            reported.extend(problems)
            warnings.warn(
                f"plan: {', and '.join(problems)}. The plan was made without an example, by the order of registration: "
                "its bytes may be wrong, and KEEP without effect; give make_plan an example",
                stacklevel=2,
            )

    for unit in plan.sharded_units:
        for name in unit.modules:
            model.get_submodule(name).register_forward_pre_hook(partial(before_unit, unit), with_kwargs=True)
    model.register_forward_hook(after_model)


def cast_batch_norms(model: nn.Module, plan: WrapPlan) -> None:
    """Have each batch norm use its weights in the dtype of its running statistics, in place.

    Weights are gathered in bf16, statistics are buffers and stay fp32: torch 2.11 refuses the mix
    (github.com/pytorch/torchtitan/issues/674; a unit of its own in fp32, as advised there, would be gathered apart).
    """
    if plan.fsdp.mixed_precision or plan.fsdp.frozen_precision:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.affine and module.running_mean is not None:
                module.forward = partial(batch_norm, module, module.forward)  # type: ignore[method-assign]


def batch_norm(module: _BatchNorm, forward: Any, x: torch.Tensor) -> torch.Tensor:
    """Call a batch norm's forward with its weights cast to the dtype of its statistics.

    Until it returns, the module's `weight` and `bias` are the casts; its registered parameters do not change.
    """
    attributes = vars(module)
    views: dict[str, Any] = {key: attributes[key] for key in ("weight", "bias") if key in attributes}  # of FSDP1
    for key in ("weight", "bias"):
        # An attribute of the instance hides the registered parameter.
        attributes[key] = getattr(module, key).to(module.running_mean.dtype)  # type: ignore[union-attr]
    try:
        return forward(x)
    finally:
        for key in ("weight", "bias"):
            del attributes[key]
        attributes.update(views)


def compile_units(model: nn.Module, plan: WrapPlan) -> None:
    """Compile the innermost units in place, if the plan says so. Hooks of the wrapper stay outside, uncompiled."""
    if not plan.fsdp.compile_units:
        return
    plan.fsdp.check_machine()
    names: list[str] = []
    for unit in plan.units:
        if unit.params and not unit.is_root:
            names += unit.modules
    for name in names:
        if not contains([name], names):
            module = model.get_submodule(name)
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


def refuse_changes(wrapped: nn.Module, model: nn.Module, plan: WrapPlan) -> None:
    """Have the forward raise ParamError if a parameter has been frozen or un-frozen since it was wrapped.

    Un-frozen, its gradient would be missing, or would not be reduced: each rank would train another model. Frozen, DDP
    would wait for its gradient; FSDP does not.
    """
    frozen = [p for p in wrapped.parameters() if not p.requires_grad]
    waited_for = [p for p in wrapped.parameters() if p.requires_grad and plan.backend is Backend.DDP]

    def check(*_: Any) -> None:
        if any(p.requires_grad for p in frozen):  # cheap, for every forward
            stop_at_errors(model_changed(model, plan))
        if not all(p.requires_grad for p in waited_for):
            stop_at_errors(frozen_later(model, plan))

    wrapped.register_forward_pre_hook(check)


def refuse_parts_first(wrapped: nn.Module, plan: WrapPlan) -> None:
    """Have sharded parts of the model raise ParamError if they are called before the first forward of the whole model.

    In it FSDP learns which unit is the root. A part that is called before would be taken for it.
    """
    sharded: set[str] = set()  # names of modules that hold sharded parameters, themselves or further down
    for unit in plan.sharded_units:
        for p in unit.params:
            for name in (p.name, *p.aliases):
                sharded.update(ancestors(name))
    sharded.discard("")  # the whole model
    hooks: list[RemovableHandle] = []

    def check(name: str, *_: Any) -> None:
        state: Any = wrapped._get_fsdp_state() if isinstance(wrapped, FSDPModule) else wrapped
        if state._is_root is None:
            raise ParamError(
                "model",
                f"{name} was called before the first forward of the whole model, in which FSDP learns its root; call "
                "the model itself first, such as model(**batch) under torch.no_grad()",
            )
        for hook in hooks:  # from now on they would only take time
            hook.remove()
        hooks.clear()

    for full_name, module in wrapped.named_modules():
        name = plain_name(full_name, wrapped)
        if name in sharded:
            hooks.append(module.register_forward_pre_hook(partial(check, name), prepend=True))
