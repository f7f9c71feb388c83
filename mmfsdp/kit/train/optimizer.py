"""The optimizer of this rank's shards of what trains, its learning rate, and the loss scale of fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...core.before_step import computes_in_fp16
from ...core.collectives import compute_device
from ...core.names import named_tensors, plain_name, planned_params
from ...core.optimizer_states import optimizer_of
from ...core.reshard import reshard
from ...core.step import local_part
from ...core.units import decays
from ...params import TrainParams
from .learning_rates import pattern_of, schedule_factor


def build_optimizer(model: nn.Module, params: TrainParams) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer of the trainable parameters, and its schedule: call `schedule.step()` after each step.

    Weight decay is for matrices: norms, biases, gates and embeddings have none. A parameter has the peak learning rate
    of the last pattern of `params.lr_for` that matches one of its names, else `params.lr`; parts of a model of
    transformers must be spelled out (learning_rates.py).
    """
    reshard(model)  # after a forward without a backward, parameters may still be unsharded
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for names, p in named_tensors(model):
        if p.requires_grad:
            is_matrix = has_decay(model, names, p)
            weight_decay = params.weight_decay if is_matrix else 0.0
            pattern = pattern_of(all_names(model, names), list(params.lr_for))
            # An optimizer takes one group for each weight decay and learning rate; Muon takes matrices only.
            lr = params.lr_for.get(pattern, params.lr)
            group = {"params": [], "weight_decay": weight_decay, "lr": lr, "matrices": is_matrix}
            groups.setdefault((weight_decay, lr, is_matrix), group)["params"].append(p)
    ordered = sorted(groups.values(), key=lambda group: group["lr"] != params.lr)  # a step tells the first one's
    optimizer = optimizer_of(params.optimizer, ordered, lr=params.lr)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, params))


def adamw(groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    """Return AdamW of groups of parameters, each with its learning rate and weight decay."""
    # fused: one kernel for all parameters, which takes the flag `found_inf` without asking the host.
    return LocalAdamW(groups, lr=lr, fused=True)


class LocalAdamW(AdamW):
    """AdamW that hands its kernel plain local shards instead of DTensors. The results are equal, bit for bit.

    torch 2.11 dispatches every operator on a DTensor in Python, which takes longer than the arithmetic on small shards.
    Needed until github.com/pytorch/pytorch/issues/134191 is closed.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        # `step` calls this to fill its lists of parameters, gradients and states, then calls the kernel on them.
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return has_complex


def has_decay(model: nn.Module, names: list[str], p: torch.Tensor) -> bool:
    """Return True if weight decay applies to a parameter, which has several names if it is tied."""
    # The plan knows: FSDP1's shards are flat and no longer show whether they come from a matrix.
    planned = planned_params(model, names)
    return any(each.decays for each in planned) if planned else decays(model, names, ndim=p.ndim)


def all_names(model: nn.Module, names: list[str]) -> list[str]:
    """Return all names, before wrapping, of the trainable parameters that a tensor with these names stands for."""
    planned = [each for each in planned_params(model, names) if each.trainable]
    if not planned:
        return [plain_name(name, model) for name in names]
    return [planned[0].name, *planned[0].aliases]  # those of one flat parameter have the same learning rate


def lr_factor(step: int, params: TrainParams) -> float:
    """Return the factor of the peak learning rate at a step, counted from 0: linear warm-up, then the schedule."""
    if step < params.warmup_steps:
        return (step + 1) / params.warmup_steps
    return schedule_factor(params.schedule, step - params.warmup_steps, params.steps - params.warmup_steps)


class Scaler:
    """The loss scale of fp16 (Micikevicius et al. 2018), with the constants and the growth of torch.amp.GradScaler.

    All ranks have the same scale: an overflow shows in the global gradient norm, so nothing more is sent.
    torch 2.11's own scalers refuse DTensors together with plain tensors, which a plan with REPLICATE has.
    """

    def __init__(self, device: torch.device | str = "cpu", *, scale: float = 2.0**16, interval: int = 2000) -> None:
        """interval: steps without an overflow after which the scale grows."""
        self.scale = torch.tensor(scale, device=device)
        self.interval = interval
        self._steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """Grow the scale, or back off after an overflow. Does not wait for the device."""
        overflow = (~finite).float()
        # Doubled after `interval` steps, halved after an overflow.
        torch._amp_update_scale_(self.scale, self._steps, overflow, 2.0, 0.5, self.interval)

    def state_dict(self) -> dict[str, float]:
        """Return plain numbers, the same on every rank."""
        return {"scale": self.scale.item(), "growth_tracker": self._steps.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the numbers of `state_dict`."""
        self.scale.fill_(state["scale"])
        self._steps.fill_(state["growth_tracker"])


def build_scaler(model: nn.Module) -> Scaler | None:
    """Return a new scaler if the model computes in fp16 by its plan, else None."""
    return Scaler(compute_device(model)) if computes_in_fp16(model) else None
