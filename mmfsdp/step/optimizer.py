"""AdamW over what trains, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..params import Schedule, TrainParams
from ..params.train import decays
from .ranks import local, trainable


class LocalAdamW(AdamW):
    """AdamW that hands its kernel this rank's parts. Given DTensors it would go through a dispatch in Python each step,
    which takes longer than small shards' arithmetic; the result is the same, bit for bit, and so is what it keeps."""

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:  # of `step`
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def build_optimizer(model: nn.Module, params: TrainParams) -> tuple[AdamW, LambdaLR]:
    """AdamW over what trains only, and its learning rate: call `schedule.step()` after each step.

    Weight decay is for matrices: norms, biases, gates and embeddings have none. Raises ParamError for a model that is
    no longer frozen as it was planned.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):  # as after a forward without a backward, it may be gathered
            module.reshard()
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for p, called in names.items():
        if p.requires_grad:
            groups[_decays(model, called, p)].append(p)
    decay = {True: params.weight_decay, False: 0.0}
    optimizer = LocalAdamW(
        [{"params": ps, "weight_decay": decay[kind]} for kind, ps in groups.items() if ps], lr=params.lr, fused=True
    )
    stop_if_not_as_planned(model, optimizer)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, params))


def lr_factor(step: int, params: TrainParams) -> float:
    """Share of the peak learning rate in optimizer step `step`, from 0: a linear warm-up, then the schedule to 0."""
    if step < params.warmup_steps:
        return (step + 1) / params.warmup_steps
    done = (step - params.warmup_steps) / max(1, params.steps - params.warmup_steps)
    if params.schedule is Schedule.LINEAR:
        return max(0.0, 1 - done)
    if params.schedule is Schedule.COSINE:
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return 1.0


def stop_if_not_as_planned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ParamError for what the lint calls an error; names are looked at only where numbers differ."""
    plan = getattr(model, "mmfsdp_plan", None)
    if plan is None:
        return
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trains = {id(p) for p in trainable(model)}
    if given == trains and len(trains) == sum(p.trainable for p in plan.params):
        return
    from ..plan.lint import lint_training
    from ..plan.units import stop_at_errors

    stop_at_errors(lint_training(model, plan, optimizer))


def _decays(model: nn.Module, names: list[str], p: nn.Parameter) -> bool:
    """By the plan where there is one: FSDP1's shards no longer show whether they are of a matrix."""
    plan = getattr(model, "mmfsdp_plan", None)
    name = _plain(names[0])
    if plan is not None and name.endswith("_flat_param"):  # use_orig_params false: a unit as a whole
        unit = name.removesuffix("_flat_param").rstrip(".")
        return any(p.decays for u in plan.units if unit in u.modules for p in u.params)
    if plan is not None:
        return plan.by_name[name].decays
    owners = [type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names]
    return all(decays(name, ndim=p.ndim, owner=owner) for name, owner in zip(names, owners, strict=True))


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
