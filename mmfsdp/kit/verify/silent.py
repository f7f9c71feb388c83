"""check_trained: parameters that train and get no gradient, and whether the loss depends on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .differences import parts
from .lines import NOTE, OK, WRONG, Line
from .trial import Trial

MOVED = 1e-6
"""Relative change of the loss, above which it depends on what was changed."""


def check_trained(trial: Trial) -> Line:
    """Every parameter that trains gets a gradient, if the loss depends on it."""
    grads = [step.grads for step in trial.steps_alone]
    silent = [name for name in trial.trainable if not any(step.get(name) is not None for step in grads)]
    if not silent:
        return Line(OK, "trained", f"all {len(trial.trainable)} parameters that train get a gradient")
    detached = [name for name in silent if loss_depends_on(trial, [name])]
    if detached:
        words = f"the loss depends on {parts(detached, trial.trainable)}, which get no gradient"
        fix = "look for .detach(), .item(), .data or torch.no_grad() on the way from there to the loss; or freeze it"
        return Line(WRONG, "trained", words, fix)
    words = f"no batch here uses {parts(silent, trial.trainable)}, which train; freeze them if no batch does"
    return Line(NOTE, "trained", words)


@torch.no_grad()
def loss_depends_on(trial: Trial, names: Sequence[str]) -> bool:
    """Return True if the loss of this rank's batch changes with these parameters, in one process."""
    model, loss = trial.plain, trial.loop.loss
    training = model.training
    model.eval()
    before = float(loss(model, trial.batch))
    with changed(model, names):
        after = float(loss(model, trial.batch))
    model.train(training)
    return abs(after - before) > MOVED * max(abs(before), 1e-3)


@contextmanager
def changed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Add random numbers, as large as the values, to some parameters; take them away at the end."""
    kept = {name: model.get_parameter(name).detach().clone() for name in names}
    generator = torch.Generator().manual_seed(0)
    try:
        for name, values in kept.items():
            noise = torch.randn(values.shape, generator=generator, dtype=torch.float32).to(values.dtype)
            model.get_parameter(name).add_(noise * (values.float().abs().mean() + 0.02))
        yield
    finally:
        for name, values in kept.items():
            model.get_parameter(name).copy_(values)
