"""check_no_picture: a rank whose batch has no picture enters the units that the others enter, and the step is right."""

from __future__ import annotations

from typing import Any

import torch

from ...core.names import plain_name
from ..compat.describe_lint import NO_PICTURE_PAGE, reduces_unused
from .differences import parts, total_difference
from .lines import NOTE, OK, WRONG, Line
from .trial import Trial

FIX = "have the forward run these parts on a blank picture whose tokens have no weight in the loss"
SWITCH = (
    "set_reduce_scatter_unused_params(True), which is set here, does not help: ranks then reduce units in different "
    "orders, and the gradients of units of equal size are mixed without an error"
)


def check_no_picture(trial: Trial) -> Line:
    """A rank whose batch has no picture takes part in every collective."""
    without = trial.loop.without_picture
    if without is None:
        words = f"not checked: {trial.loop.no_picture_note or 'no such batch was given'}"
        if reduces_unused(trial.model):
            words += f"; {SWITCH} ({NO_PICTURE_PAGE})"
        return Line(NOTE, "no picture", words)
    # In one process first: it names what is left out, and nobody waits for anybody.
    usual, usual_grads = entered(trial, trial.loop.batches[0])
    units, grads = entered(trial, without)
    skipped = [name for name in usual if name not in units]
    added = [name for name in units if name not in usual]
    if skipped or added or units != usual:
        words = "a batch without a picture runs the units in another order than one with pictures"
        if skipped or added:
            words = f"a batch without a picture does not enter {parts(skipped or added, trial.units())}"
        return Line(
            WRONG, "no picture", f"{words}: ranks with a picture wait there for the others ({NO_PICTURE_PAGE})", FIX
        )
    unlike = sorted(usual_grads ^ grads)
    if unlike:
        words = f"without a picture no gradient arrives at {parts(unlike, trial.trainable)}"
        words += ": ranks with a picture reduce more than the others"
        if reduces_unused(trial.model):
            words += f"; {SWITCH}"
        return Line(WRONG, "no picture", f"{words} ({NO_PICTURE_PAGE})", FIX)
    # Then on real ranks, of which the last has no picture.
    batches = [*trial.loop.batches[:-1], without]
    alone = trial.step_alone(batches)
    ours = trial.step_on_ranks(batches[trial.rank])
    difference = total_difference(ours.grads, alone.grads)
    if difference > 10 * trial.tolerance:
        words = f"the gradient differs from one process by {difference:.1e} of its norm"
        return Line(WRONG, "no picture", f"one rank had none, and {words}", FIX)
    return Line(OK, "no picture", f"rank {trial.ranks - 1} had none, and the step is that of one process")


def entered(trial: Trial, batch: Any) -> tuple[list[str], set[str]]:
    """Return the units that a batch enters in one process, in order, and the parameters that get a gradient."""
    model, units = trial.plain, set(trial.units())
    names: dict[str, None] = {}
    hooks = []
    for full_name, module in model.named_modules():
        name = plain_name(full_name, model)
        if name in units:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: names.setdefault(name) and None))
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        loss = trial.loop.loss(model, batch)
        if loss.requires_grad:
            loss.backward()
    for hook in hooks:
        hook.remove()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return list(names), grads
