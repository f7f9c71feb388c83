"""check_derivatives: the gradients of autograd, compared with finite differences of the loss.

Autograd does not follow what is computed under `torch.no_grad()` or detached; the loss depends on it all the same.
Where only a part of a branch is detached, each parameter still gets a gradient, but a wrong one. The comparison runs in
one process and in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...params import ParamError
from ..data.own_random import own_random
from .differences import parts
from .lines import NOTE, OK, WRONG, Line
from .trial import Trial, fill_zeros

NAME = "derivatives"
STEPS = (1e-2, 3e-3)
"""Relative changes of the parameters. The loss of many models is computed in fp32: its rounding hardly shows with the
first one. The curvature of the loss shows less with the second one."""
PRECISE = 0.02
"""Share below which the second step is not needed."""
DIRECTIONS = 3
MAX_PARTS = 12
"""Parts of the model that are compared, each with all its parameters at once."""
MAX_PARAMETERS = 50_000_000
"""A model of more would take minutes."""
LIMIT_S = 20.0
"""Seconds after which no further part is compared."""
TOLERANCE = 0.1
"""Share of a part's gradient that may be missing."""
STABLE = 0.3
"""Share by which a deviation may change with the step."""
MIN_CHANGE = 1e-4
"""Relative change of the loss, if all parameters of a part change by their own size, below which it is not judged: a
loss in fp32 is rounded to 6e-8 of itself, which is 3e-6 of it in a difference with the first step."""

Direction = Mapping[str, Tensor]
"""Change of each parameter by its name: plus or minus the size of its values, at random."""


def check_derivatives(trial: Trial) -> Line:
    """The gradient of each part of the model is the derivative of the loss."""
    model = trial.loop.build()
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        words = f"not checked: {count / 1e6:,.0f} M parameters are too many (the limit is {MAX_PARAMETERS / 1e6:.0f} M)"
        return Line(NOTE, NAME, words)
    # A gate of 0 would make every derivative behind it 0.
    fill_zeros(model)
    try:
        # eval: dropout would draw another loss in each forward.
        in_float64(model.eval())
        found = missing_shares(model, lambda: trial.loop.loss(model, trial.batch), trial.forward_has_collectives)
    except (ParamError, RuntimeError, TypeError, ValueError) as error:
        return Line(NOTE, NAME, f"not checked: the forward cannot run in float64 ({str(error).strip()[:200]})")
    wrong = [name for names, share, _ in found if share > TOLERANCE for name in names]
    largest = max([share for _, share, _ in found], default=0.0)
    if wrong and trial.forward_has_collectives:
        factors = [factor for _, share, factor in found if share > TOLERANCE]
        # A collective without a gradient leaves each rank its own part of the derivative: 1 / ranks of it.
        by_ranks = all(abs(factor * trial.ranks - 1) < TOLERANCE for factor in factors)
        how = f"differs by {largest:.0%} from"
        if by_ranks:
            how = f"is {1 / trial.ranks:.2f} of"
        words = f"in {parts(wrong, trial.trainable)} the gradient {how} the derivative of the loss of all ranks: what a"
        fix = "gather with a gradient: torch.distributed.nn.functional.all_gather"
        return Line(WRONG, NAME, f"{words} collective in the forward returns carries no gradient to other ranks", fix)
    if wrong:
        words = (
            f"a part of the gradient is missing in {parts(wrong, trial.trainable)}: autograd and finite differences "
        )
        fix = "look for .detach(), .item(), .data or torch.no_grad() on a part of the way from there to the loss"
        return Line(WRONG, NAME, f"{words}of the loss differ by {largest:.0%}", fix)
    if not found:
        return Line(NOTE, NAME, "not checked: the loss hardly depends on any trainable part of the model")
    words = f"in {len(found)} parts of the model the gradient is the derivative of the loss"
    return Line(OK, NAME, f"{words} (largest difference {largest:.0e})")


def in_float64(model: nn.Module) -> None:
    """Convert a model, and what each of its modules gets, to float64."""

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(_as_double, (args, kwargs))

    model.double()
    for module in model.modules():
        # Modules with weights need inputs of their dtype; what the root gets may go into operators of its own.
        if next(module.parameters(recurse=False), None) is not None or module is model:
            module.register_forward_pre_hook(cast, with_kwargs=True)


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def missing_shares(
    model: nn.Module, loss: Callable[[], Tensor], over_ranks: bool = False
) -> list[tuple[list[str], float, float]]:
    """Return (names of its parameters, share, factor) of each part of the model.

    share: by how much its gradient differs from finite differences. factor: the gradient over the finite differences.
    Parts that cannot be judged, or that come after LIMIT_S, are left out.

    over_ranks: the forward calls collectives, so that a loss depends on the parameters of all ranks: losses and
    gradients are averaged over ranks, which all move their parameters at once. Every rank must call it.
    """
    # The same random numbers as in the differences below.
    with own_random(0):
        value = loss()
    is_usable = value.requires_grad and bool(value.isfinite())
    if is_usable:
        value.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    measured = loss
    if over_ranks:
        for grad in grads.values():
            grad.copy_(mean_over_ranks(grad))

        def measured() -> Tensor:
            return mean_over_ranks(loss())

    if not is_usable:
        return []
    found, end = [], time.monotonic() + LIMIT_S
    for names in parts_of(list(grads)):
        # The clock of one rank decides nothing alone: ranks that left the loop would leave the others waiting.
        late = torch.tensor(float(time.monotonic() > end))
        if (mean_over_ranks(late) if over_ranks else late) > 0:  # on all ranks, or on none
            break
        compared = _compare(model, measured, {name: grads[name] for name in names}, abs(value.item()))
        if compared is not None:
            found.append((names, *compared))
    return found


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over ranks, without a gradient. Every rank must call it."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def parts_of(names: Sequence[str]) -> list[list[str]]:
    """Return names in groups that share the first pieces: as many pieces as give at most MAX_PARTS groups."""
    groups = [list(names)]
    for depth in range(1, max((name.count(".") for name in names), default=0) + 2):
        deeper: dict[str, list[str]] = {}
        for name in names:
            deeper.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(deeper) > MAX_PARTS:
            break
        groups = list(deeper.values())
    return groups


def _compare(
    model: nn.Module, loss: Callable[[], Tensor], grads: Mapping[str, Tensor], value: float
) -> tuple[float, float] | None:
    """Return by how much finite differences along some directions deviate from the gradient, as a share, and a factor.

    The entries of a direction are plus or minus a size at random, so the mean square of what is missing along it is the
    square of the size of all that is missing. The factor is that of the gradient over the differences, along all
    directions. Returns None if the loss hardly depends on these parameters, and if the deviation depends on the step:
    then it is rounding, or the loss is not smooth here.
    """
    deviations: list[list[float]] = []
    shares: list[float] = []
    for step in STEPS:
        slopes, differences, by_grads = [], [], []
        for direction in directions(model, list(grads)):
            by_grads.append(sum(float((grads[name] * values).sum()) for name, values in direction.items()))
            slopes.append(_slope(model, loss, direction, step))
            differences.append(slopes[-1] - by_grads[-1])
        # The expected size of a slope along random signs: the root of the sum of the squares of its terms.
        expected = sum(float((grads[name] * values).square().sum()) for name, values in direction.items()) ** 0.5
        size = max(expected, _rms(slopes))
        if size < MIN_CHANGE * value:
            return None
        factor = sum(a * b for a, b in zip(by_grads, slopes, strict=True)) / max(sum(b * b for b in slopes), 1e-30)
        deviations.append(differences)
        shares.append(_rms(differences) / size)
        # Rounding can only add to a deviation, so a small one with either step settles it.
        if shares[-1] < PRECISE:
            return shares[-1], factor
    if min(shares) > TOLERANCE:
        # What is missing from the gradient stays, whatever the step; rounding and curvature do not.
        changes = [after - before for before, after in zip(*deviations, strict=True)]
        return (min(shares), factor) if _rms(changes) < STABLE * _rms(deviations[0]) else None
    return min(shares), factor


def directions(model: nn.Module, names: Sequence[str]) -> Iterator[Direction]:
    """Yield directions in the space of some parameters, the same ones in each call."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(DIRECTIONS):
        direction = {}
        for name in names:
            p = model.get_parameter(name)
            # -1 or 1: every entry moves by the same share of the size of its parameter.
            signs = torch.randint(2, p.shape, generator=generator, dtype=p.dtype) * 2 - 1
            direction[name] = signs * p.detach().square().mean().sqrt()
        yield direction


@torch.no_grad()
def _slope(model: nn.Module, loss: Callable[[], Tensor], direction: Direction, step: float) -> float:
    """Return the central difference of the loss along a direction."""
    losses = []
    for sign in (1, -1):
        with moved(model, direction, sign * step), own_random(0):
            losses.append(float(loss()))
    return (losses[0] - losses[1]) / (2 * step)


@contextmanager
def moved(model: nn.Module, direction: Direction, step: float) -> Iterator[None]:
    """Add so many times a direction to the parameters; give them their values back at the end."""
    kept = {name: model.get_parameter(name).detach().clone() for name in direction}
    try:
        for name, values in direction.items():
            model.get_parameter(name).add_(values, alpha=step)
        yield
    finally:
        for name, values in kept.items():
            model.get_parameter(name).copy_(values)


def _rms(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / max(len(values), 1)) ** 0.5
