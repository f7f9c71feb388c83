"""check_step: what `train_step` looks at before it begins, so that no rank trains wrongly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..params import ParamError, Precision
from ..params.findings import stop_at_errors
from .collectives import rank
from .guards import hooks_after_wrapping, list_all, model_changed
from .model_record import CheckedParameters, plan_of, record_of
from .names import parameters_of, plain_name
from .optimizer_states import CLOSURE, needs_closure
from .reshard import drop_failed_step, reshard
from .written_state import warn_of_frozen_norms


def check_step(model: nn.Module, optimizer: Optimizer, scaler: object | None) -> None:
    """Raise before a step that would train wrongly. First end what came before it.

    A forward without a backward is resharded. The gradients of a step, or of a backward, that an error has stopped are
    dropped.

    ParamError if the optimizer needs a closure, lacks a trainable parameter, or has a frozen one of a planned model, or
    if a parameter has a gradient already; ValueError for fp16 without a scaler. Names are made, and the optimizer is
    looked at, only where parameters, what trains, or the optimizer have changed since the last step.
    """
    if isinstance(optimizer, (list, tuple)):
        fix = "join them once, before the loop: SeveralOptimizers(*optimizers), from mmfsdp.core.several_optimizers"
        raise ParamError("optimizer", f"is a {type(optimizer).__name__} of {len(optimizer)}; {fix}")
    if needs_closure(type(optimizer)):
        raise ParamError("optimizer", f"{type(optimizer).__name__} {CLOSURE}")
    if scaler is None and computes_in_fp16(model):
        raise ValueError("scaler: None, and gradients in fp16 underflow without one; give it build_scaler(model)")
    drop_failed_step(model)
    reshard(model)  # FSDP2 lists whole tensors while a unit is gathered; gradients go to the shards
    parameters = parameters_of(model)
    record = record_of(model)
    state = parameter_state(parameters, optimizer)
    if record.checked is None or record.checked.state != state:
        names = {id(p): plain_name(name, model) for name, p in model.named_parameters()}
        check_optimized(model, optimizer, names)
        record.checked = CheckedParameters(state, names)
    with_gradient = [record.checked.names[id(p)] for p in parameters if p.grad is not None]
    if with_gradient:
        raise ParamError(
            "model",
            f"{list_all(with_gradient)}: has a gradient of a backward before train_step, which would be added to this "
            "step's; call optimizer.zero_grad() first, and leave every backward of a step to train_step",
        )
    warn_of_frozen_norms(model)
    if rank() == 0 and not record.first_step_checked:
        for finding in hooks_after_wrapping(model):
            warnings.warn(finding.message, stacklevel=3)


def parameter_state(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> list[int]:
    """Return numbers that change with the parameters of a model, with what trains, and with what is optimized."""
    state = [id(p) for p in parameters]
    for tensors in ([p for p in parameters if p.requires_grad], *(group["params"] for group in optimizer.param_groups)):
        state += [-1, *map(id, tensors)]
    return state


def check_optimized(model: nn.Module, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raise ParamError unless the optimizer has what trains, and nothing that a plan has as frozen.

    names: of the model's parameters, by identity.
    """
    optimized: set[torch.Tensor] = set()
    for group in optimizer.param_groups:
        optimized.update(group["params"])
    plan = plan_of(model)
    missing = []
    trainable = 0
    for p in parameters_of(model):
        trainable += p.requires_grad
        if p.requires_grad and p not in optimized:
            missing.append(names[id(p)])
        if plan and p in optimized and not p.requires_grad:
            raise ParamError(
                "optimizer",
                f"{names[id(p)]}: frozen, yet given to the optimizer, which may decay it; give it only the "
                "parameters with requires_grad (build_optimizer does)",
            )
    if missing and plan:
        # A parameter that was frozen when the plan was made is no fault of the optimizer.
        stop_at_errors(model_changed(model, plan))
    if missing:
        raise ParamError("optimizer", not_optimized(missing, trainable))
    if plan is None and isinstance(model, DistributedDataParallel):
        check_plain_ddp(model)


def check_plain_ddp(model: DistributedDataParallel) -> None:
    """Raise ParamError if DDP without a plan waits for gradients of other parameters than train now."""
    reduced = model._get_ddp_logging_data()["num_parameter_tensors"]
    trainable = 0
    for name, p in model.module.named_parameters():
        trainable += p.requires_grad and name not in model.parameters_to_ignore
    # With find_unused_parameters DDP does not wait for what was frozen later.
    may_have_fewer = model.find_unused_parameters and trainable < reduced
    if trainable != reduced and not may_have_fewer:
        raise ParamError(
            "model",
            f"{trainable} parameters train, and when DDP wrapped the model {reduced} did: DDP reduces the gradients of "
            "those, and waits for each; freeze before DistributedDataParallel, and wrap again",
        )


def not_optimized(missing: list[str], trainable: int) -> str:
    """Return what is wrong with an optimizer that lacks these of so many trainable parameters."""
    # Wrapping replaces parameters, so an optimizer made before it updates tensors that nobody uses.
    fix = "make it after the model is wrapped"
    if len(missing) == trainable:
        return f"nothing that trains was given to the optimizer; {fix}"
    return (
        f"{list_all(missing)}: trainable, but not given to the optimizer, so they would never change; {fix}, from "
        "all parameters with requires_grad, or freeze these before"
    )


def computes_in_fp16(model: nn.Module) -> bool:
    """Return True if the model's plan says fp16."""
    plan = plan_of(model)
    return plan is not None and plan.fsdp.mixed_precision is Precision.FP16
