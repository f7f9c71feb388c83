"""train_step: global loss, global gradient norm, one clip."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..data.batch import Batch
from .metrics import StepMetrics
from .optimizer import stop_if_not_as_planned
from .ranks import device_of, local, on, sum_over_ranks, sums_and_norm, world_size
from .scaler import Scaler, computes_in_fp16


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    schedule: LambdaLR | None = None,
    max_grad_norm: float | None = None,
    scaler: Scaler | None = None,
    asked: Callable[[], bool] = bool,
) -> StepMetrics:
    """One optimizer step over the micro-batches of this rank. Every rank must call it with as many.

    The loss is the mean over the label tokens of all ranks and micro-steps, as if one process had them all in one
    batch; so is the gradient. With several sources it is the sum of their means, each times its weight. The norm is
    global and clipped once. If it or the loss is not finite, no rank changes weights. scaler: of `build_scaler`; a
    model in fp16 needs it, and ValueError is raised without. ParamError tells of a frozen parameter that the optimizer
    was given, and of one that is trainable only since the model was wrapped.
    `asked` tells whether this rank is to make room; the answer travels with the norm.
    Leave batches on the CPU: their label tokens are counted there, so that nobody waits for the device.
    """
    if scaler is None and computes_in_fp16(model):
        raise ValueError("scaler: None, and gradients in fp16 vanish without; give train_step build_scaler(model)")
    stop_if_not_as_planned(model, optimizer)
    device = device_of(model)
    clock = _Clock()
    scale = scaler.scale.clone() if scaler else torch.ones((), device=device)
    counts_here = [label_tokens(batch) for batch in micro_batches]
    weights = {batch.source: batch.weight for batch in micro_batches}
    places = [list(weights).index(batch.source) for batch in micro_batches]
    counts = [sum(n for n, place in zip(counts_here, places, strict=True) if place == i) for i in range(len(weights))]
    counted = sum_over_ranks(on(device, [*counts, sum(batch.size for batch in micro_batches)]))
    tokens, samples = counted[:-1], counted[-1]
    per_token = on(device, list(weights.values())) / tokens.clamp(min=1)
    sums = torch.zeros_like(tokens)
    for i, batch in enumerate(micro_batches):
        with _accumulating(model, last=i == len(micro_batches) - 1):
            share = token_sum(model(**batch.to(device).inputs()).loss.float(), counts_here[i])
            sums[places[i]] += share.detach()
            clock.lap("forward")
            # Wrappers average gradients over ranks; we want their sum.
            (share * (world_size() * per_token[places[i]]).float() * scale).backward()
            clock.lap("backward")
    sums, norm, making_room = sums_and_norm(model, sums, asked())
    loss, norm = sums @ per_token, norm / scale
    finite = torch.isfinite(norm + loss)
    lr = optimizer.param_groups[0]["lr"]
    clip = None if max_grad_norm is None else (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    _update(optimizer, finite=finite, factor=clip if scaler is None else (1.0 if clip is None else clip) / scale)
    if scaler:
        scaler.update(finite)
    if schedule is not None:
        schedule.step()
    clock.lap("optimizer")
    figures = torch.cat([torch.stack([loss, norm, tokens.sum(), samples, making_room]), sums / tokens.clamp(min=1)])
    if scaler:
        figures = torch.cat([figures, scale.double()[None]])
    spent = clock.spent["forward"], clock.spent["backward"], clock.spent["optimizer"]
    here, arrived = _sent_home(figures)
    return StepMetrics(here, tuple(weights), lr, *spent, arrived)


def _sent_home(figures: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """(figures on the CPU, when they are there): behind this step's work and before the next one's."""
    if figures.device.type != "cuda":
        return figures, None
    here = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True).copy_(figures, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return here, arrived


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] += now - self.last
        self.last = now


def label_tokens(batch: Batch) -> int:
    """Tokens that a causal model is asked for: the first of a sequence never is."""
    assert batch.labels is not None
    return int((batch.labels[:, 1:] != -100).sum())


def token_sum(mean: torch.Tensor, tokens: int) -> torch.Tensor:
    """The loss summed over its tokens; 0, with a gradient of 0, where there are none and the mean is 0/0."""
    return mean * tokens if tokens else torch.nan_to_num(mean) * 0


@contextmanager
def _accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Gradients meet the other ranks' in the last micro-step only; units that are held stay gathered until then."""
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        if last:
            yield
        else:
            with model.no_sync():
                yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        for module in model.modules():
            unit = getattr(module, "mmfsdp_unit", None)
            if not isinstance(module, FSDPModule) or unit is None:
                continue
            if unit.kind == "frozen":  # torch 2.11 fails without, on units not entered: an encoder's that is cached
                module.set_requires_gradient_sync(True, recurse=False)
            if unit.hold:
                module.set_reshard_after_forward(last and unit.reshard_after_forward, recurse=False)
                module.set_reshard_after_backward(last, recurse=False)
    yield


@torch.no_grad()
def _update(optimizer: Optimizer, *, finite: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Multiply the gradients by `factor` and step; all on the device, so that nobody waits for the norm."""
    if factor is not None:
        for grads in _by_kind(local(p.grad) for g in optimizer.param_groups for p in g["params"] if p.grad is not None):
            torch._foreach_mul_(grads, factor.to(dtype=grads[0].dtype, device=grads[0].device))
    if optimizer.defaults.get("fused"):
        place = optimizer.param_groups[0]["params"][0].device  # the CPU's, where shards are offloaded
        optimizer.found_inf = (~finite).float().to(place)  # type: ignore[attr-defined]  # the kernel then does nothing
        optimizer.step()
    elif bool(finite):  # waits for the device
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    return list(kinds.values())
