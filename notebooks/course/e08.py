"""Checks of 08_find_the_bug: each runs the learner's script on two ranks, and judges by what comes of it."""

from __future__ import annotations

import runpy
from functools import cache
from typing import Any

from .checks import DEADLOCK, MISMATCH, exercise
from .script import original, ran

RANKS = 2
STORIES = {
    "08.bug1": (
        "Seen in transformers issue 37186, 'FSDP model training hangs when some batches do not contain images' "
        "(https://github.com/huggingface/transformers/issues/37186), and in torchtitan pull request 4777, 'Fix FSDP "
        "hanging for multimodal models' (https://github.com/pytorch/torchtitan/pull/4777). What would have caught it: "
        "one test step in which one rank gets a batch without a picture; mmfsdp.verify does it (without_picture=...)."
    ),
    "08.bug2": (
        "By default fully_shard keeps the root unit gathered after forward, since backward needs it at once; see "
        "pytorch issue 131965, on a root that stays unsharded after forward "
        "(https://github.com/pytorch/pytorch/issues/131965). After an evaluation no backward comes: step() changes the "
        "shards, and the next forward still has the old weights. The same cause, another effect: pytorch issue 149205, "
        "on parameters that an optimizer does not update "
        "(https://github.com/pytorch/pytorch/issues/149205). What would have caught it: a run without an evaluation "
        "beside the run with one, and their losses compared to the last digit."
    ),
    "08.bug3": (
        "enable_input_require_grads was made for checkpointing with use_reentrant=True, which loses the gradient if no "
        "input requires one; use_reentrant=False does not need it: transformers issue 21381, 'gradient checkpointing "
        "disables requires_grad when freezing part of models (fix with use_reentrant=False)' "
        "(https://github.com/huggingface/transformers/issues/21381). Training scripts call it without a reason that "
        "anybody remembers: lmms-finetune issue 71 (https://github.com/zjysteven/lmms-finetune/issues/71). What would "
        "have caught it: the number of all-gathers in backward, beside the plan's; the plan's lint calls it "
        "inputs-require-grad."
    ),
}
"""Where each bug was seen, and what would have caught it. `check` shows this when the script is right."""
LOSS_TOLERANCE = 1e-4
"""Relative: the ranks add in another order than one process does."""


@cache
def parts_of(number: int) -> dict[str, Any]:
    """Return the functions of a script as it ships."""
    return runpy.run_path(str(original(number)))


def results_of(number: int) -> list[dict[str, Any]] | str:
    """Return what both ranks of the learner's script saved, or the hint that says why there is nothing to judge."""
    found = ran(number)
    if found == DEADLOCK:
        return (
            f"The ranks still wait for each other. `%run_script {number} recorder` shows in which collective each of "
            f"them is, and `%run_script {number} stacks` in which line."
        )
    if found == MISMATCH:
        return (
            "A rank got more than it waited for: the ranks are in different collectives, or their tensors have "
            f"different shapes. `%run_script {number} detail` names both."
        )
    return found


def rows_hint(ranks: list[dict[str, Any]], name: str, steps: int) -> str | None:
    """Return the hint if a rank has not logged so many values of this name."""
    for rank, values in enumerate(ranks):
        logged = values["rows"].get(name)
        if logged is None:
            return f"Rank {rank} logs no {name!r} any more: each row needs it."
        if len(logged) != steps:
            return f"Rank {rank} logs {len(logged)} values of {name!r}, and should log {steps}."
    return None


def first_difference(mine: Any, right: list[float]) -> int | None:
    """Return the first index at which values differ by more than rounding; None if they are equal."""
    for step, (value, wanted) in enumerate(zip(mine.tolist(), right, strict=True)):
        if abs(value - wanted) > LOSS_TOLERANCE * max(abs(wanted), 1e-3):
            return step
    return None


def earliest_difference(ranks: list[dict[str, Any]], right: list[list[float]]) -> tuple[int, int] | None:
    """Return the first step at which a loss differs, and the rank; None if all are equal."""
    different = []
    for rank, values in enumerate(ranks):
        step = first_difference(values["rows"]["loss"], right[rank])
        if step is not None:
            different.append((step, rank))
    return min(different, default=None)


def same_weights(mine: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether the weights are equal but for rounding."""
    import torch

    return set(mine) == set(right) and all(
        torch.allclose(mine[name], value, rtol=1e-3, atol=1e-5) for name, value in right.items()
    )


def one_process(losses_of: Any, model: Any, optimizer: Any, steps: int) -> list[list[float]]:
    """Train in one process with the mean of all ranks' losses; return each rank's losses. losses_of: (model, step)."""
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for step in range(steps):
        parts = losses_of(model, step)
        optimizer.zero_grad()
        (sum(parts) / RANKS).backward()
        optimizer.step()
        for rank, loss in enumerate(parts):
            losses[rank].append(loss.item())
    return losses


def sgd(model: Any) -> Any:
    """Return the optimizer of the scripts."""
    import torch

    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


# ---- 1: hangs with some batches


@cache
def text_only_reference() -> tuple[list[list[float]], dict[str, Any]]:
    """Return each rank's losses, and the weights at the end, of one process with all data."""
    script = parts_of(1)
    model = script["build"]()
    batch_of = script["batch_of"]
    losses = one_process(
        lambda net, step: [net(*batch_of(step, rank)) for rank in range(RANKS)], model, sgd(model), script["STEPS"]
    )
    return losses, dict(model.named_parameters())


@exercise("08.bug1")
def text_only() -> str | None:
    """All ranks reach the end with the losses and weights of one process with all data."""
    found = results_of(1)
    if isinstance(found, str):
        return found
    losses, weights = text_only_reference()
    if hint := rows_hint(found, "loss", len(losses[0])):
        return f"{hint} Batches of text alone are data, too: no rank may leave out a step."
    if different := earliest_difference(found, losses):
        step, rank = different
        mine = found[rank]["rows"]["loss"][step].item()
        return (
            f"No rank hangs. But the loss of rank {rank} in step {step} is {mine:.4f}, and that of its batch is "
            f"{losses[rank][step]:.4f}. What the encoder makes of a blank picture must not count: multiply it by 0."
        )
    if not same_weights(found[0]["weights"], weights):
        return "The losses are right, and the weights at the end are not those of one process with all data."
    return None


# ---- 2: other losses with an evaluation


@cache
def evaluation_reference() -> tuple[list[list[float]], list[float], list[float]]:
    """Return each rank's losses, and the held-out losses before and after each step, of one process."""
    import torch

    script = parts_of(2)
    model, batch_of = script["build"](), script["batch_of"]
    optimizer = script["make_optimizer"](model)
    losses: list[list[float]] = [[], []]
    before: list[float] = []
    after: list[float] = []
    for step in range(script["STEPS"]):
        for held_out in (before, after):
            with torch.no_grad():
                parts = [model(**batch_of(0, rank, held_out=True)).item() for rank in range(RANKS)]
            held_out.append(sum(parts) / RANKS)
            if held_out is before:
                step_losses = one_process(
                    lambda net, _, step=step: [net(**batch_of(step, rank)) for rank in range(RANKS)],
                    model,
                    optimizer,
                    1,
                )
        for rank in range(RANKS):
            losses[rank] += step_losses[rank]
    return losses, before, after


@exercise("08.bug2")
def stale_weights() -> str | None:
    """The losses of a training without an evaluation, and the held-out losses."""
    found = results_of(2)
    if isinstance(found, str):
        return found
    losses, before, after = evaluation_reference()
    if hint := rows_hint(found, "loss", len(losses[0])):
        return hint
    if different := earliest_difference(found, losses):
        step, rank = different
        if same_weights(found[0]["weights"], dict(parts_of(2)["build"]().named_parameters())):
            return "Nothing is learned: the weights at the end are those of the beginning. Does step() get gradients?"
        mine = found[rank]["rows"]["loss"][step].item()
        return (
            f"Rank {rank}: the loss of step {step} is {mine:.5f}, and without an evaluation it is "
            f"{losses[rank][step]:.5f}. Which weights does that forward use: is every unit gathered anew?"
        )
    every = parts_of(2)["EVALUATE_EVERY"]
    if hint := rows_hint(found, "held_out", len(losses[0]) // every):
        return f"The training is right. But {hint[0].lower()}{hint[1:]} Evaluate as often as before."
    held_out = found[0]["rows"]["held_out"]
    if None not in (first_difference(held_out, before[::every]), first_difference(held_out, after[::every])):
        return "The training is right, and the held-out losses are not those of its weights."
    return None


# ---- 3: slower after an upgrade


@cache
def frozen_layers_reference() -> tuple[list[list[float]], int]:
    """Return each rank's losses of one process, and how often a step must gather in backward."""
    import torch

    script = parts_of(3)
    model = script["build"]()
    random = [torch.Generator().manual_seed(rank) for rank in range(RANKS)]

    def losses_of(net: Any, step: int) -> list[Any]:
        return [net(torch.randint(script["WORDS"], (8, 16), generator=each)) for each in random]

    trained_layers = sum(any(p.requires_grad for p in layer.parameters()) for layer in model.layers)
    return one_process(losses_of, model, sgd(model), script["STEPS"]), trained_layers


@exercise("08.bug3")
def input_requires_grad() -> str | None:
    """The same losses, and in backward only the layers that backward needs are gathered."""
    found = results_of(3)
    if isinstance(found, str):
        return found
    losses, needed = frozen_layers_reference()
    if hint := rows_hint(found, "loss", len(losses[0])):
        return hint
    if different := earliest_difference(found, losses):
        return f"Now the loss of step {different[0]} is another one: the same two layers must train, on the same data."
    steps = len(losses[0])
    gathers = found[0]["counts"].get("all-gather, backward", 0) / steps
    if gathers > needed + 1:  # prefetch gathers the unit before the last needed one, too
        return (
            f"A step still gathers {gathers:.0f} units in backward, and only {needed} layers train. Backward passes "
            "through a layer if its input requires a gradient: which input is the first?"
        )
    if gathers < needed:
        return (
            f"A step gathers {gathers:.0f} units in backward: units stay whole from forward on, which takes the memory "
            "that FSDP should save. Backward still computes gradients for the inputs of frozen layers: why?"
        )
    return None


# ---- out of memory


@exercise("08.class")
def layer_class(name: str | type) -> str | None:
    """A unit per layer."""
    from .lessons import encoder_plan

    name = name.__name__ if isinstance(name, type) else name
    if not isinstance(name, str):
        return "The name of a class, as a string."
    try:
        plan = encoder_plan(name)
    except ValueError as error:
        return str(error)
    largest = max(unit.numel for unit in plan.units) / sum(unit.numel for unit in plan.units)
    if largest > 0.2 and len(plan.units) > 1:
        return f"Modules of no such class stay in the root unit: {largest:.0%} of the model, gathered at once."
    if largest > 0.2:
        return f"The largest unit holds {largest:.0%} of the model, gathered at once. Name the class of one *layer*."
    if len(plan.units) > 30:
        return f"{len(plan.units)} units are too many: each all-gather has a fixed cost. Make one per layer."
    return None
