"""The optimizer, its schedule, and one training step: global loss, global gradient norm, one clip."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .data.batch import Batch
from .params import Precision, Schedule, TrainParams
from .params.train import decays
from .scaler import Scaler


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks. Reading a figure waits for the step's end on a GPU; holding does not."""

    figures: torch.Tensor
    """(5 + sources,) float64 on the CPU: loss, gradient norm before clipping, label tokens, samples, ranks that were
    asked to make room, and the loss of each source; with a scaler, its scale after them."""
    sources: tuple[str, ...]
    """Where in the parameters the sources of the step's batches stand."""
    lr: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    """Seconds of this rank's host; on a GPU work goes on after them."""
    arrived: torch.cuda.Event | None = None
    """When the figures have come from a GPU."""
    _read: list[float] = field(default_factory=list, repr=False)

    def _figure(self, place: int) -> float:
        if not self._read:
            if self.arrived is not None:
                self.arrived.synchronize()
            self._read.extend(self.figures.tolist())
        return self._read[place]

    @property
    def loss(self) -> float:
        """Mean over the label tokens of all ranks and micro-steps; of several sources, the weighted sum of theirs."""
        return self._figure(0)

    @property
    def losses(self) -> dict[str, float]:
        """The mean loss of each source, before its weight."""
        return {source: self._figure(5 + i) for i, source in enumerate(self.sources)}

    @property
    def grad_norm(self) -> float:
        """2-norm of the whole gradient, before clipping."""
        return self._figure(1)

    @property
    def tokens(self) -> int:
        """Label tokens of all ranks and micro-steps."""
        return int(self._figure(2))

    @property
    def samples(self) -> int:
        """Samples of all ranks and micro-steps."""
        return int(self._figure(3))

    @property
    def asked(self) -> bool:
        """A rank was asked to make room: all know it now."""
        return self._figure(4) > 0

    @property
    def loss_scale(self) -> float | None:
        """What the loss was multiplied by for backward; None without a scaler."""
        place = 5 + len(self.sources)
        return self._figure(place) if len(self.figures) > place else None

    @property
    def skipped(self) -> bool:
        """The loss or the norm was not finite, and no rank changed its weights."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def to_dict(self) -> dict[str, Any]:
        """The keys of a metrics line."""
        names = ("loss", "lr", "grad_norm", "samples", "tokens", "forward_s", "backward_s", "optimizer_s", "skipped")
        row = {name: getattr(self, name) for name in names}
        row |= {"losses": self.losses} if len(self.sources) > 1 else {}
        return row | ({"loss_scale": self.loss_scale} if self.loss_scale is not None else {})


def build_scaler(model: nn.Module) -> Scaler | None:
    """A new scaler for a model that computes in fp16 by its plan; None for others, which need none."""
    return Scaler(_device(model)) if _computes_in_fp16(model) else None


def _computes_in_fp16(model: nn.Module) -> bool:
    plan = getattr(model, "mmfsdp_plan", None)
    return plan is not None and plan.fsdp.mixed_precision is Precision.FP16


def build_optimizer(model: nn.Module, params: TrainParams) -> tuple[AdamW, LambdaLR]:
    """AdamW over what trains only, and its learning rate: call `schedule.step()` after each step.

    Weight decay is for matrices: norms, biases, gates and embeddings have none. Raises ParamError for a model that is
    no longer frozen as it was planned.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for p, called in names.items():
        if p.requires_grad:
            groups[_decays(model, called, p)].append(p)
    decay = {True: params.weight_decay, False: 0.0}
    optimizer = AdamW(
        [{"params": ps, "weight_decay": decay[kind]} for kind, ps in groups.items() if ps], lr=params.lr, fused=True
    )
    _stop_if_not_as_planned(model, optimizer)
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
    if scaler is None and _computes_in_fp16(model):
        raise ValueError("scaler: None, and gradients in fp16 vanish without; give train_step build_scaler(model)")
    _stop_if_not_as_planned(model, optimizer)
    device = _device(model)
    clock = _Clock()
    scale = scaler.scale.clone() if scaler else torch.ones((), device=device)
    local = [_label_tokens(batch) for batch in micro_batches]
    weights = {batch.source: batch.weight for batch in micro_batches}
    places = [list(weights).index(batch.source) for batch in micro_batches]
    counts = [sum(n for n, place in zip(local, places, strict=True) if place == i) for i in range(len(weights))]
    counted = _sum_over_ranks(_on(device, [*counts, sum(batch.size for batch in micro_batches)]))
    tokens, samples = counted[:-1], counted[-1]
    per_token = _on(device, list(weights.values())) / tokens.clamp(min=1)
    sums = torch.zeros_like(tokens)
    for i, batch in enumerate(micro_batches):
        with _accumulating(model, last=i == len(micro_batches) - 1):
            share = _token_sum(model(**batch.to(device).inputs()).loss.float(), local[i])
            sums[places[i]] += share.detach()
            clock.lap("forward")
            # Wrappers average gradients over ranks; we want their sum.
            (share * (_world_size() * per_token[places[i]]).float() * scale).backward()
            clock.lap("backward")
    sums, norm, making_room = _global_sums_and_norm(model, sums, asked())
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


def _on(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    """Plain numbers on the device, float64; nobody waits for them."""
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.spent[name] += now - self.last
        self.last = now


def _label_tokens(batch: Batch) -> int:
    """Tokens that a causal model is asked for: the first of a sequence never is."""
    assert batch.labels is not None
    return int((batch.labels[:, 1:] != -100).sum())


def _token_sum(mean: torch.Tensor, tokens: int) -> torch.Tensor:
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
            if isinstance(module, FSDPModule) and unit is not None and unit.hold:
                module.set_reshard_after_forward(last and unit.reshard_after_forward, recurse=False)
                module.set_reshard_after_backward(last, recurse=False)
    yield


def _global_sums_and_norm(model: nn.Module, sums: torch.Tensor, asked: bool) -> tuple[torch.Tensor, ...]:
    """(sums, gradient norm, ranks asked to make room) over all ranks, float64. Each element of the gradient counts
    once, wherever it is held."""
    squares: dict[int, list[torch.Tensor]] = {}
    for p in _trainable(model):
        if p.grad is not None:
            squares.setdefault(_copies(model, p), []).append(_local(p.grad))
    total = sums.new_zeros(())
    for copies, grads in squares.items():
        norms = torch.stack(torch._foreach_norm(grads)).to(device=sums.device, dtype=torch.float64)
        total += norms.square().sum() / copies
    summed = _sum_over_ranks(torch.cat([sums, total[None], _on(sums.device, [asked])]))
    return summed[:-2], summed[-2].sqrt(), summed[-1]


def _copies(model: nn.Module, p: nn.Parameter) -> int:
    """How many ranks hold the same elements of a gradient."""
    if isinstance(p, DTensor):
        sizes = zip(p.placements, p.device_mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if not isinstance(placement, Shard))
    if isinstance(model, FullyShardedDataParallel):
        plan = getattr(model, "mmfsdp_plan", None)
        return plan.replicate if plan else 1
    return _world_size()


def _update(optimizer: Optimizer, *, finite: torch.Tensor, factor: torch.Tensor | None) -> None:
    """Multiply the gradients by `factor` and step; all on the device, so that nobody waits for the norm."""
    if factor is not None:
        for grads in _by_kind(
            _local(p.grad) for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        ):
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


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stop_if_not_as_planned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ParamError for what the lint calls an error; names are looked at only where numbers differ."""
    plan = getattr(model, "mmfsdp_plan", None)
    if plan is None:
        return
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.requires_grad for p in given):
        if len(given) == len(_trainable(model)) == sum(p.trainable for p in plan.params):
            return
    from .plan.lint import lint_training
    from .plan.units import stop_at_errors

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


def _device(model: nn.Module) -> torch.device:
    """Where the model computes."""
    if isinstance(model, FSDPModule):
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        if mesh is not None and mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
    if isinstance(model, FullyShardedDataParallel):
        return torch.device(model.compute_device or "cpu")
    return next(model.parameters()).device


def _sum_over_ranks(total: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place."""
    if _world_size() > 1:
        dist.all_reduce(total)
    return total


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
