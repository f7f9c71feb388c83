"""Trial: a training in one process and on ranks, a few steps of each from the same weights, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...core.model_record import plan_of
from ...core.names import plain_name
from ...core.parameters import hook_names
from ...core.step import divisor_of_step
from ...core.weights import copy_from_rank0
from ..data.own_random import seed_all
from .differences import (
    LOW_TOLERANCE,
    TOLERANCE,
    buffer_digests,
    frozen_digests,
    random_digests,
    random_states,
    restore_random,
    settings_of,
)
from .watched_step import LOW_PRECISION, ModuleModes, WatchedPrecision

STEPS = 2
"""Steps that are compared: the second shows what the first left behind."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loop:
    """A training that can be tried: its model in one process and on ranks, and what one step does."""

    build: Callable[[], nn.Module]
    """Return the whole model of one process, frozen as it will be trained."""
    wrapped: Callable[[], nn.Module]
    """Return the model as the ranks train it."""
    optimizer: Callable[[nn.Module], Optimizer]
    step: Callable[[nn.Module, Optimizer, Any], Any]
    """Do one step over this rank's batch. What it returns is compared, if it is a number or a dict of numbers."""
    loss: Callable[[nn.Module, Any], Tensor]
    batches: Sequence[Any]
    """Batches of each rank."""
    alone: Callable[[nn.Module, Optimizer, Sequence[Any]], Any] | None = None
    """Do one step over all ranks' batches in one process. Default: `step` on a copy of the model on each rank, whose
    gradients are averaged over ranks."""
    counts: Callable[[nn.Module, Any], tuple[int, int]] | None = None
    """Return what a batch's loss is said to be a mean over, and its rows."""
    joined: Any = None
    """All ranks' batches as one, made by the processor."""
    without_picture: Any = None
    """A batch like the last rank's whose rows have no picture."""
    no_picture_note: str = ""
    """The reason why there is no such batch."""
    labels_of_prompt: bool | None = None
    """A longer prompt has more labels; None if nobody knows."""


@dataclass(frozen=True)
class Step:
    """Holds what one step did."""

    grads: dict[str, Tensor | None]
    """Gradients by plain name, at the time of the optimizer's step: after clipping."""
    figures: dict[str, float]
    """The figures that the step returned."""
    gathered: tuple[str, ...] = ()
    """Parameters that were unsharded when the optimizer stepped."""
    unmoved: dict[str, float] = field(default_factory=dict)
    """Share of the values of a parameter in 16 bits that have a gradient and did not change."""


class Trial:
    """Both models, and the steps of both. Every rank must make it, and in the same order use it.

    At first it has the model of one process only, `plain`, for the checks that need no step. `run` does the steps.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.batch = loop.batches[self.rank]
        # Before `build` draws weights: the wrapped model is built from the same states.
        self.random_at_start = random_states()
        self.plain = loop.build()
        self.hooks = {name: hook_names(p) for name, p in self.plain.named_parameters() if hook_names(p)}
        self.forward_has_collectives = False
        self.runs_other_modules = False
        """Ranks run different modules for one and the same batch."""
        self.modes: ModuleModes | None = None
        """Modes of the modules in the forwards of `check_random`."""
        self.left_in_eval: list[str] = []
        """Modules that were in train mode before a forward of `check_random`, and not after it."""
        self.draws: list[int] = []
        """Generators, by their place in GENERATORS, from which a forward draws."""
        self.precision = WatchedPrecision()
        """Precision of all steps."""
        self.buffers_at_start = buffer_digests(self.plain)
        # Ranks may be seeded differently, and FSDP starts from the weights of rank 0.
        copy_from_rank0(self.plain, CPU)

    def run(self) -> None:
        """Wrap the model, and do the steps in one process and on ranks."""
        loop = self.loop
        restore_random(self.random_at_start)  # the same weights again, where `build` draws them without a seed
        self.model = loop.wrapped()
        # Before any forward: FSDP2 lists whole parameters while a unit is gathered.
        self.params = {plain_name(name, self.model): p for name, p in self.model.named_parameters()}
        self.optimizer = loop.optimizer(self.model)
        # Of all ranks these must differ, or all draw the same dropout masks (check_seeds).
        self.random_after_setup = random_digests()
        self.settings_at_start = settings_of(self.optimizer)
        self.other_weights = self._other_weights()
        self.frozen_before = frozen_digests(self.params)
        self.plain_optimizer = loop.optimizer(self.plain)
        with self.precision:
            self.steps_alone = [self.step_alone(loop.batches) for _ in range(STEPS)]
            self.steps = [self.step_on_ranks(self.batch) for _ in range(STEPS)]
        self.settings_at_end = settings_of(self.optimizer)
        self.frozen_after = frozen_digests(self.params)
        self.buffers_at_end = buffer_digests(self.model, wrapped=True)

    @property
    def trainable(self) -> list[str]:
        """Return the names of what trains in one process."""
        return [name for name, p in self.plain.named_parameters() if p.requires_grad]

    @property
    def tolerance(self) -> float:
        """Return the relative difference that rounding may make: much more where ranks compute in 16 bits."""
        dtypes = {p.dtype for p in self.plain.parameters() if p.is_floating_point()}
        for module in self.model.modules():
            policy = None
            if isinstance(module, FSDPModule):
                policy = module._get_fsdp_state()._mp_policy
            elif isinstance(module, FullyShardedDataParallel):
                policy = module.mixed_precision
            # None leaves the dtype of the parameters, which is among them already.
            for dtype in (getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)):
                dtypes.add(dtype or torch.float32)
        return LOW_TOLERANCE if dtypes & LOW_PRECISION or self.precision.in_16_bits else TOLERANCE

    def step_alone(self, batches: Sequence[Any]) -> Step:
        """Do a step in one process."""
        optimizer = self.plain_optimizer
        seen: list[dict[str, Tensor | None]] = []
        low = {name: p for name, p in self.plain.named_parameters() if p.requires_grad and p.dtype in LOW_PRECISION}
        before: dict[str, Tensor] = {}
        unmoved: dict[str, float] = {}

        def before_step(*_: Any) -> None:
            grads = {name: copied(p.grad) for name, p in self.plain.named_parameters() if p.requires_grad}
            seen.append(divided(grads, divisor_of_step(optimizer)))
            before.update({name: p.detach().clone() for name, p in low.items()})

        def after_step(*_: Any) -> None:
            for name, p in low.items():
                if p.grad is not None and p.grad.any():
                    # Only where there is a gradient: an embedding moves in few rows.
                    unmoved[name] = float(p.eq(before[name])[p.grad.bool()].float().mean())

        hook = optimizer.register_step_pre_hook(before_step)
        after_hook = optimizer.register_step_post_hook(after_step)
        seed_all(self.rank)
        # With collectives in the forward, one process cannot compute the batches one after another.
        if self.loop.alone is not None and not self.forward_has_collectives:
            returned = self.loop.alone(self.plain, optimizer, batches)
        else:
            with averaged_gradients(self.plain):
                returned = self.loop.step(self.plain, optimizer, batches[self.rank])
        hook.remove()
        after_hook.remove()
        return Step(seen[-1] if seen else {}, figures_of(returned), unmoved=unmoved)

    def step_on_ranks(self, batch: Any) -> Step:
        """Do a step on all ranks."""
        seen: list[tuple[dict[str, Tensor | None], tuple[str, ...]]] = []

        def before_step(*_: Any) -> None:
            gathered = []
            for full_name, p in self.model.named_parameters():
                name = plain_name(full_name, self.model)
                if self._is_gathered(name, p):
                    gathered.append(name)
            grads = divided(self.whole_tensors(grads=True), divisor_of_step(self.optimizer))
            seen.append((grads, tuple(gathered)))

        hook = self.optimizer.register_step_pre_hook(before_step)
        seed_all(self.rank)
        returned = self.loop.step(self.model, self.optimizer, batch)
        hook.remove()
        grads, gathered = seen[-1] if seen else ({}, ())
        return Step(grads, figures_of(returned), gathered)

    def _is_gathered(self, name: str, p: nn.Parameter) -> bool:
        held = self.params.get(name)
        return isinstance(held, DTensor) and not isinstance(p, DTensor)

    def whole_tensors(self, *, grads: bool) -> dict[str, Tensor | None]:
        """Return the whole trainable parameters, or their gradients, from all ranks' shards."""
        if any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules()):
            # writeback=False: this only looks.
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=grads):
                return {
                    plain_name(name, self.model): copied(p.grad if grads else p.detach())
                    for name, p in self.model.named_parameters()
                    if p.requires_grad
                }
        tensors: dict[str, Tensor | None] = {}
        for name, p in self.params.items():
            if p.requires_grad:
                tensors[name] = whole(p.grad if grads else p.detach())
        return tensors

    def _other_weights(self) -> list[str]:
        """Return the trainable parameters that are not rank 0's of one process, once they are wrapped."""
        different = []
        plain = dict(self.plain.named_parameters())
        for name, tensor in self.whole_tensors(grads=False).items():
            same = name in plain and tensor is not None and tensor.shape == plain[name].shape
            if same and tensor is not None:
                # Loosely: the wrapped weights may be stored in 16 bits.
                same = torch.allclose(tensor.float(), plain[name].detach().float(), rtol=1e-2, atol=1e-6)
            if not same:
                different.append(name)
        return different

    def units(self) -> list[str]:
        """Return the names of the modules that gather their parameters, but the root."""
        plan = plan_of(self.model)
        if plan is not None:
            return [name for unit in plan.sharded_units for name in unit.modules if name]
        sharded = (FSDPModule, FullyShardedDataParallel)
        names: dict[str, None] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, sharded):
                names[plain_name(name, self.model)] = None
        return [name for name in names if name]


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Give small random values to trainable parameters that begin as zeros: gates, LoRA's second matrices, biases.

    What stands behind a gate of 0 has a gradient of 0, which would be right on any number of ranks.
    """
    for p in model.parameters():
        if p.requires_grad and not p.is_meta and not p.any():
            nn.init.normal_(p, std=0.02)


def copied(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor; None of None."""
    return None if tensor is None else tensor.detach().clone()


def divided(tensors: dict[str, Tensor | None], divisor: float) -> dict[str, Tensor | None]:
    """Return tensors, some of them None, divided by a number; the very same for 1."""
    if divisor == 1:
        return tensors
    return {name: None if tensor is None else tensor / divisor for name, tensor in tensors.items()}


def whole(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor, whole. Every rank must call it."""
    return copied(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def figures_of(returned: Any) -> dict[str, float]:
    """Return the numbers that a step returned, by name."""
    values = returned if isinstance(returned, dict) else {"what step returns": returned}
    figures = {}
    for name, value in values.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            figures[str(name)] = float(value)
    return figures


@contextmanager
def averaged_gradients(model: nn.Module) -> Iterator[None]:
    """Average the gradients of all ranks' copies of a model at the end of each backward.

    This is what FSDP does, without sharding: a mean over ranks of the gradients of their losses. A gradient that was
    averaged before does not change, so gradients may be accumulated.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    waiting: list[bool] = []

    def average() -> None:
        waiting.clear()
        has_grad = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32)
        # Ranks may use different parts of the model. All must call all_reduce for the same parameters.
        dist.all_reduce(has_grad, op=dist.ReduceOp.MAX)
        for p, any_has in zip(trainable, has_grad.tolist(), strict=True):
            if any_has:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def after_gradient(_: Tensor) -> None:
        # Once for each backward: the callback runs when all gradients are there.
        if not waiting:
            waiting.append(True)
            Variable._execution_engine.queue_callback(average)

    hooks = [p.register_post_accumulate_grad_hook(after_gradient) for p in trainable]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
