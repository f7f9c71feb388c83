"""train_step: one optimizer step. Loss, gradient norm and clip are as in one process with all ranks' data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .before_step import check_step
from .collectives import compute_device, sum_over_ranks, world_size
from .gradient_sync import gradient_sync
from .micro_batch import as_batches, check_loss, label_tokens, lint_loss, logits_of, loss_of
from .model_record import plan_of, record_of
from .names import parameters_of, unwrapped
from .optimizer_states import READ_BY_KERNELS
from .same_parts import UsedParts, watch_parts
from .step_batch import StepBatch
from .token_loss import sums_of_heads
from .written_state import watch_state

FIGURES = ("loss", "grad_norm", "tokens", "samples", "stop_votes", "loss_scale", "same_parts")
"""The figures of a step, in the order in which they travel to the host; then the mean loss of each source."""


def train_step(
    model: nn.Module,
    micro_batches: Sequence[StepBatch | Mapping[str, Any]],
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    max_grad_norm: float | None = None,
    scaler: LossScale | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> StepMetrics:
    """Do one optimizer step over this rank's micro-batches. Every rank must call it, with as many of them.

    Args:
        model: The wrapped model. Its forward returns a loss; see `loss_of`.
        micro_batches: This rank's micro-batches: mappings of the forward's keyword arguments, as a collator returns
            them, or objects with the methods of `StepBatch`. Leave them on the CPU.
        optimizer: Holds the trainable parameters of the wrapped model, and no others.
        schedule: Learning-rate schedule, stepped once.
        max_grad_norm: The gradient's global 2-norm is clipped to it. Default: no clipping.
        scaler: Loss scale; needed for fp16 (`build_scaler`).
        stop_requested: Called once. If it returns True on one rank, `stop_requested` of the result is True on all.

    Returns:
        The figures of the step over all ranks: loss, gradient norm, tokens, samples. Reading one waits for the GPU.

    Raises:
        ParamError: If the optimizer does not fit the model, if a parameter has a gradient already, if ranks have
            different numbers of micro-batches or other sources, or if the forward returns no scalar loss. If ranks
            used different parts of the model: then no rank has changed its weights, and on a GPU it is raised two
            steps later, or when a figure is read.
        ValueError: For fp16 without a scaler.
    """
    check_step(model, optimizer, scaler)
    batches = as_batches(model, micro_batches)
    parts = watch_parts(model)
    parts.begin()
    device, lr = compute_device(model), first_lr(optimizer)
    scale = 1.0 if scaler is None else scaler.scale.clone()

    # 1. Count the label tokens of all ranks: the loss is a mean over them, for each source of data by itself.
    rank_tokens = [label_tokens(model, batch) for batch in batches]
    sources, source_weights, tokens, samples = count_labels(batches, rank_tokens, device)
    token_weights = source_weights / tokens.clamp(min=1)  # (sources,)

    # 2. Forward and backward. Gradients are reduced over ranks in the last micro-batch only.
    loss_sums = torch.zeros_like(token_weights)  # (sources,), of this rank
    state = watch_state(model)
    for i, batch in enumerate(batches):
        source = sources.index(batch.source)
        with gradient_sync(model, last=i == len(batches) - 1), state:
            mean = mean_loss(model, batch.to(device).inputs(), rank_tokens[i])
            loss_sum = token_sum(mean, rank_tokens[i])
            loss_sums[source] += loss_sum.detach()
            # DDP and FSDP divide gradients by the number of ranks; this multiplication makes them sums again.
            (loss_sum * (world_size() * token_weights[source]).float() * scale).backward()

    # 3. One norm over the whole gradient. The losses, the ranks' votes to stop and a number that compares the parts
    # that each rank used travel in the same all-reduce.
    votes_to_stop = stop_requested is not None and stop_requested()
    squares, votes = squared_grad_norm(model, device), to_device([votes_to_stop, parts.check_number(model)], device)
    totals = sum_over_ranks(torch.cat([loss_sums, squares, votes]))
    state.stop_if_written()
    loss_sums, square, stop_votes, parts_check = totals[:-3], totals[-3], totals[-2], totals[-1]
    loss, grad_norm, same_parts = loss_sums @ token_weights, square.sqrt() / scale, parts_check == 0

    # 4. Clip once and step. If the loss or the norm is not finite, or if ranks used different parts of the model, no
    # rank changes its weights.
    finite = torch.isfinite(loss + grad_norm) & same_parts
    step_if(finite, optimizer, scaler, factor=gradient_factor(grad_norm, max_grad_norm, scale))
    if schedule is not None:
        schedule.step()
    # In the order of FIGURES.
    figures = [loss, grad_norm, tokens.sum(), samples, stop_votes, scale, same_parts]
    on_host, arrived = send_to_host([*figures, *(loss_sums / tokens.clamp(min=1))], device)
    metrics = StepMetrics(on_host, arrived, scaler is not None, sources, sum(rank_tokens), lr, parts.used)
    parts.check_later(metrics.check, waited=arrived is None or not optimizer.defaults.get("fused"))
    return metrics


class LossScale(Protocol):
    """The loss scale of fp16, as a step needs it; `train.optimizer` has one."""

    scale: torch.Tensor
    """(): the factor of the loss."""

    def update(self, finite: torch.Tensor) -> None:
        """Grow the scale or back off after a step; finite: (), False after an overflow."""


def first_lr(optimizer: Optimizer) -> float | torch.Tensor:
    """Return the learning rate of the first group. A tensor is copied: a schedule fills it with the next step's."""
    lr: float | torch.Tensor = optimizer.param_groups[0]["lr"]
    return lr.clone() if isinstance(lr, torch.Tensor) else lr


def mean_loss(model: nn.Module, inputs: dict[str, Any], tokens: int) -> torch.Tensor:
    """Return the model's loss in fp32; lint it in the first step. Raises ParamError where there is none."""
    inner = unwrapped(model)
    if record_of(model).first_step_checked:
        loss = loss_of(model(**inputs))
        check_loss(inner, loss)
        return loss.float()
    with sums_of_heads(inner) as sums:
        output = model(**inputs)
    loss = loss_of(output)
    check_loss(inner, loss)
    logits = sums[0] if len(sums) == 1 else logits_of(output)
    lint_loss(inner, loss, logits, inputs.get("labels"), tokens)
    record_of(model).first_step_checked = True
    return loss.float()


def count_labels(
    batches: Sequence[StepBatch], rank_tokens: list[int], device: torch.device
) -> tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the names of the sources, their weights and label tokens, both (sources,), and all samples, ().

    rank_tokens: this rank's label tokens, by micro-batch. Counts are over all ranks and micro-batches.
    Every rank must have the same sources, in the same order.
    """
    weights: dict[str, float] = {}
    tokens: dict[str, int] = {}
    samples = 0
    for batch, count in zip(batches, rank_tokens, strict=True):
        weights[batch.source] = batch.weight
        tokens[batch.source] = tokens.get(batch.source, 0) + count
        samples += batch.size
    totals = sum_over_ranks(to_device([*tokens.values(), samples], device))
    return list(weights), to_device([*weights.values()], device), totals[:-1], totals[-1]


def to_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return plain numbers as a float64 tensor. The host does not wait for the device."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # else the copy may wait for what the GPU has still to do
    return tensor.to(device, non_blocking=True)


def token_sum(mean: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the sum of a mean loss over its tokens. Without tokens the mean is 0/0: return 0, with a gradient of 0."""
    return mean * tokens if tokens else torch.nan_to_num(mean) * 0


@torch.no_grad()  # else `to_local` records a function for each gradient
def squared_grad_norm(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Return this rank's part of the gradient's squared 2-norm, (1,) float64: the parts of all ranks add up to it."""
    grads, copies = [], []
    for p in parameters_of(model):
        if p.requires_grad and p.grad is not None:
            grads.append(local_part(p.grad))
            copies.append(count_copies(model, p))
    if not grads:
        return to_device([0.0], device)
    # One kernel for all gradients; then float64, in which small squares added to large ones keep their digits.
    norms = torch.stack(torch._foreach_norm(grads)).to(device=device, dtype=torch.float64)
    # Ranks that hold the same elements each add their share, so that the sum over all ranks counts them once.
    return (norms.square() / to_device(copies, device)).sum(dim=0, keepdim=True)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count_copies(model: nn.Module, p: nn.Parameter) -> int:
    """Return how many ranks hold the same elements of a parameter's gradient."""
    if isinstance(p, DTensor):
        # On a mesh of two axes the ranks of the replicate axis hold the same shard.
        axes = zip(p.placements, p.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in axes if not isinstance(placement, Shard))
    if isinstance(model, FullyShardedDataParallel):
        # Its shards are plain tensors, so only the plan knows of replicas.
        plan = plan_of(model)
        return plan.replicate if plan else 1
    return world_size()  # DDP: every rank holds all of it


@torch.no_grad()
def gradient_factor(
    grad_norm: torch.Tensor, max_grad_norm: float | None, scale: torch.Tensor | float
) -> torch.Tensor | None:
    """Return the factor that divides gradients by the loss scale and clips their global norm to max_grad_norm.

    None if they are neither scaled nor clipped. The norm is over all ranks' shards together, so every rank has the same
    factor (Pascanu et al. 2013).
    """
    if max_grad_norm is None and isinstance(scale, float):
        return None
    factor = torch.ones_like(grad_norm)
    if max_grad_norm is not None:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        factor = (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return (factor / scale).float()


def step_if(
    finite: torch.Tensor, optimizer: Optimizer, scaler: LossScale | None, *, factor: torch.Tensor | None
) -> None:
    """Step with gradients times `factor` if `finite`, tell the scaler, and drop the gradients."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), finite.device)
    if factor is not None and not scales_gradients(optimizer):
        multiply_gradients(optimizer, factor)
    elif factor is not None:
        # The kernel divides by it while it has the gradients, which saves a kernel and a pass over them.
        optimizer.grad_scale = factor.reciprocal().to(device)  # type: ignore[attr-defined]
    try:
        if optimizer.defaults.get("fused"):
            # The fused kernel does nothing if found_inf is 1: the host need not know, so it does not wait.
            optimizer.found_inf = (~finite).float().to(device)  # type: ignore[attr-defined]
            optimizer.step()
        elif bool(finite):  # waits for the device
            optimizer.step()
    finally:
        for name in READ_BY_KERNELS:  # the next step may be one of the caller's
            vars(optimizer).pop(name, None)
    optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update(finite)


def divisor_of_step(optimizer: Optimizer) -> float:
    """Return what the optimizer's kernel divides gradients by in this step, where `train_step` clips by it; else 1.

    For whoever looks at gradients in a hook before the step: they are not clipped yet.
    """
    scale = getattr(optimizer, "grad_scale", None)  # torch's GradScaler sets None after `unscale_`
    return 1.0 if scale is None else float(scale)


def scales_gradients(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's kernels divide gradients by its `grad_scale`, as torch.amp.GradScaler asks it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.defaults.get("fused"))


@torch.no_grad()
def multiply_gradients(optimizer: Optimizer, factor: torch.Tensor) -> None:
    """Multiply all gradients of an optimizer by a number, (), by one kernel."""
    grads = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                grads.append(local_part(p.grad))
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device))


def send_to_host(
    figures: list[torch.Tensor | float], device: torch.device
) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy figures to the CPU, behind this step's work. Return them and the event after which they can be read."""
    on_device = []
    for figure in figures:
        # Without pinned memory in between, the copy of a plain number would wait for the device.
        tensor = figure if isinstance(figure, torch.Tensor) else to_device([figure], device)[0]
        on_device.append(tensor.to(dtype=torch.float64))
    stacked = torch.stack(on_device)
    if stacked.device.type != "cuda":
        return stacked, None
    # Only a copy to pinned memory lets the host go on while it runs.
    on_host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return on_host, arrived


@dataclass(frozen=True)
class StepMetrics:
    """The figures of one optimizer step, over all ranks unless said otherwise.

    Reading one waits for the GPU; holding the record does not.
    """

    figures: torch.Tensor
    """(len(FIGURES) + sources,) float64 on the CPU: FIGURES, then the mean losses of the sources."""
    arrived: torch.cuda.Event | None
    """Event that a GPU passes once the figures are there; None on the CPU."""
    scaled: bool
    """A scaler multiplied the loss."""
    sources: list[str]
    """Names of the data sources."""
    rank_tokens: int
    """Label tokens of this rank."""
    lr: float | torch.Tensor
    """Learning rate of the optimizer's first group; a tensor if the optimizer has one."""
    used: UsedParts = field(default_factory=UsedParts)
    """The parts of the model that this rank used."""

    @cached_property
    def _values(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        values = self.figures.tolist()
        if not values[FIGURES.index("same_parts")]:
            self.used.stop()
        self.used.forget()
        return values

    def check(self) -> None:
        """Raise ParamError if ranks used different parts of the model. Every rank must call it."""
        _ = self._values

    def _figure(self, name: str) -> float:
        return self._values[FIGURES.index(name)]

    @property
    def loss(self) -> float:
        """Mean over the label tokens of all ranks and micro-batches; with several sources, their weighted sum."""
        return self._figure("loss")

    @property
    def grad_norm(self) -> float:
        """2-norm of the whole gradient, before clipping."""
        return self._figure("grad_norm")

    @property
    def tokens(self) -> int:
        """Label tokens of all ranks and micro-batches."""
        return int(self._figure("tokens"))

    @property
    def samples(self) -> int:
        """Samples of all ranks and micro-batches."""
        return int(self._figure("samples"))

    @property
    def stop_requested(self) -> bool:
        """Some rank was asked to stop: all ranks learn it in the same step."""
        return self._figure("stop_votes") > 0

    @property
    def losses(self) -> dict[str, float]:
        """The mean loss of each source, without its weight."""
        return dict(zip(self.sources, self._values[len(FIGURES) :], strict=True))

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in backward; None without a scaler."""
        if not self.scaled:
            return None
        return self._figure("loss_scale")

    @property
    def skipped(self) -> bool:
        """The loss or the norm was not finite, and no rank changed its weights."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of a row of metrics."""
        row: dict[str, Any] = {"loss": self.loss, "lr": float(self.lr), "grad_norm": self.grad_norm}
        row |= {"samples": self.samples, "tokens": self.tokens, "skipped": self.skipped}
        if len(self.sources) > 1:
            row["losses"] = self.losses
        if self.loss_scale is not None:
            row["loss_scale"] = self.loss_scale
        return row
