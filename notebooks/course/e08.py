"""Checks of 08_find_the_bug: each runs the learner's script on two ranks, and judges by what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmfsdp.kit.widgets.ranks_cell.ranks_magic import artifacts

from . import clinic_references as reference
from .checks import DEADLOCK, MISMATCH, exercise
from .clinic_stories import STORIES as STORIES
from .script import ANOTHER_ORDER, changed_figures, exercise_name, ran

LOSS_TOLERANCE = 1e-4
"""Relative: the ranks add in another order than one process does."""
Ranks = list[dict[str, Any]]
"""What each rank's script has saved: "rows", a tensor for each figure; "weights"; "counts" of collectives."""


def results_of(number: int) -> Ranks | str:
    """Return what both ranks of the learner's script saved, or the hint that says why there is nothing to judge."""
    for name, (before, now) in changed_figures(number).items():
        return f"{name} is {now} in your copy, and was {before}: set it back, and check again."
    found = ran(number)
    if found in (DEADLOCK, MISMATCH) and ANOTHER_ORDER in (artifacts(exercise_name(number)) / "0.log").read_text():
        return f"{NAMES_A_STEP} Then the ranks wait for each other."
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


NAMES_A_STEP = (
    "As the script stands it is right. With its batches in another order it is not: does your copy name a step or a "
    "rank? Decide by what is in the batch."
)


def in_both_orders(number: int, judge: Callable[[Ranks, bool], str | None]) -> str | None:
    """Return the hint for a script that runs twice. judge: takes the ranks' results, and whether they are the second
    run's; returns the hint for it."""
    found = results_of(number)
    if isinstance(found, str):
        return found
    if hint := judge(found, False):
        return hint
    if "moved" not in found[0]:
        return "The script has no `batch_of(step, rank)` any more: leave it as it is."
    hint = judge([values["moved"] for values in found], True)
    return hint and f"{NAMES_A_STEP} ({hint})"


def rows_hint(ranks: Ranks, name: str, steps: int) -> str | None:
    """Return the hint if a rank has not logged so many values of this name."""
    for rank, values in enumerate(ranks):
        logged = values["rows"].get(name)
        if logged is None:
            return f"Rank {rank} logs no {name!r} any more: the rows need it."
        if len(logged) != steps:
            return f"Rank {rank} logs {len(logged)} values of {name!r}, and should log {steps}."
    return None


def first_difference(mine: Any, right: list[float]) -> int | None:
    """Return the first index at which values differ by more than rounding; None if they are equal."""
    for step, (value, wanted) in enumerate(zip(mine.tolist(), right, strict=True)):
        if not abs(value - wanted) <= LOSS_TOLERANCE * max(abs(wanted), 1e-3):
            return step
    return None


def earliest_difference(ranks: Ranks, right: list[list[float]]) -> tuple[int, int] | None:
    """Return the first step at which a loss differs, and the rank; None if all are equal."""
    different = []
    for rank, values in enumerate(ranks):
        step = first_difference(values["rows"]["loss"], right[rank])
        if step is not None:
            different.append((step, rank))
    return min(different, default=None)


def same(mine: dict[str, Any], right: dict[str, Any], part: str = "") -> bool:
    """Return whether the weights whose names begin with `part` are equal but for rounding."""
    import torch

    names = [name for name in right if name.startswith(part)]
    return all(name in mine and torch.allclose(mine[name], right[name], rtol=1e-3, atol=1e-5) for name in names)


def is_flat(ranks: Ranks) -> bool:
    """Return whether the loss of rank 0 never changes."""
    losses = ranks[0]["rows"]["loss"]
    return bool(losses.max() - losses.min() < 1e-6)


@exercise("08.bug1")
def text_only() -> str | None:
    """All ranks reach the end with the losses and weights of one process with all data."""
    return in_both_orders(1, hint_for_text_only)


def hint_for_text_only(found: Ranks, moved: bool) -> str | None:
    """Return the hint for one run of script 1."""
    right = reference.text_only(moved)
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return f"{hint} Batches of text alone are data, too: no rank may leave out a step."
    if different := earliest_difference(found, right.losses):
        step, rank = different
        mine = found[rank]["rows"]["loss"][step].item()
        return (
            f"No rank hangs. But the loss of rank {rank} in step {step} is {mine:.4f}, and that of its batch is "
            f"{right.losses[rank][step]:.4f}. What the encoder makes of a blank picture must not count: multiply it "
            "by 0."
        )
    if not same(found[0]["weights"], right.weights):
        return "The losses are right, and the weights at the end are not those of one process with all data."
    return None


@exercise("08.bug2")
def stale_weights() -> str | None:
    """The losses of a training without an evaluation, and the held-out losses."""
    found = results_of(2)
    if isinstance(found, str):
        return found
    right = reference.with_evaluation()
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    if different := earliest_difference(found, right.losses):
        step, rank = different
        if same(found[0]["weights"], reference.weights_of(reference.parts_of(2)["build"]())):
            return "Nothing is learned: the weights at the end are those of the beginning. Does step() get gradients?"
        mine = found[rank]["rows"]["loss"][step].item()
        return (
            f"Rank {rank}: the loss of step {step} is {mine:.5f}, and without an evaluation it is "
            f"{right.losses[rank][step]:.5f}. Which weights does that forward use: is every unit gathered anew?"
        )
    evaluated = right.held_out[:: reference.parts_of(2)["EVALUATE_EVERY"]]
    if hint := rows_hint(found, "held_out", len(evaluated)):
        return f"The training is right. But {hint[0].lower()}{hint[1:]} Evaluate as often as before."
    held_out = found[0]["rows"]["held_out"]
    if None not in [first_difference(held_out, list(values)) for values in zip(*evaluated, strict=True)]:
        return "The training is right, and the held-out losses are not those of its weights."
    return None


@exercise("08.bug3")
def input_requires_grad() -> str | None:
    """The same losses, and in backward only the layers that backward needs are gathered."""
    found = results_of(3)
    if isinstance(found, str):
        return found
    right = reference.frozen_layers()
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    if different := earliest_difference(found, right.losses):
        return f"Now the loss of step {different[0]} is another one: the same two layers must train, on the same data."
    gathers = found[0]["counts"].get("all-gather, backward", 0) / len(right.losses[0])
    trained_layers = 2
    if gathers > trained_layers + 1:  # prefetch gathers the unit before the last needed one, too
        return (
            f"A step still gathers {gathers:.0f} units in backward, and only {trained_layers} layers train. Backward "
            "passes through a layer if its input requires a gradient: which input is the first?"
        )
    if gathers < trained_layers:
        return (
            f"A step gathers {gathers:.0f} units in backward: units stay whole from forward on, which takes the memory "
            "that FSDP should save. Backward still computes gradients for the inputs of frozen layers: why?"
        )
    again = found[0]["recomputed"] / len(right.losses[0])
    linears = 2 * trained_layers
    if again < linears:
        return (
            f"Backward runs the forward of {again:.0f} of the {linears} `Linear` modules that train again. Keep the "
            "checkpointing of each layer that trains: without it, all that forward computes is stored."
        )
    return None


@exercise("08.bug4")
def skipped_backward() -> str | None:
    """Both ranks end with the weights of a training in which the damaged batch does the same on both."""
    return in_both_orders(4, hint_for_skipped)


def hint_for_skipped(found: Ranks, moved: bool) -> str | None:
    """Return the hint for one run of script 4."""
    import torch

    if not all(torch.isfinite(value).all() for values in found for value in values["weights"].values()):
        return (
            "The weights are not numbers any more: the gradient of the damaged batch came through the all-reduce to "
            "all ranks. Decide before backward(), and on all ranks alike."
        )
    if not same(found[0]["weights"], found[1]["weights"]):
        return "The ranks end with different weights: one has taken a step that the other one has not."
    if any(same(found[0]["weights"], reference.left_out(way, moved)) for way in ("all", "rank", "row", "zeros")):
        return None
    if same(found[0]["weights"], reference.left_out("target", moved)):
        return "The damaged row is learned, as if its target were 0. Leave it out."
    if same(found[0]["weights"], reference.left_out("never", moved)):
        return "Training ends at the damaged batch. Leave that batch out, and go on with the next one."
    return (
        "Both ranks reach the end, with weights that no training of these batches has. Were gradients of two different "
        "steps averaged? Compare what each rank prints."
    )


@exercise("08.bug5")
def evaluation_on_one_rank() -> str | None:
    """The ranks get to the end, and rank 0 has the held-out losses of all held-out texts."""
    found = results_of(5)
    if isinstance(found, str):
        return found
    right = reference.evaluated_texts()
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    if different := earliest_difference(found, right.losses):
        return f"The training has changed: the loss of step {different[0]} is another one. Only evaluate() may move."
    every = reference.parts_of(5)["EVALUATE_EVERY"]
    wanted = [after for _, after in right.held_out[every - 1 :: every]]
    if hint := rows_hint(found[:1], "held_out", len(wanted)):
        return f"No rank hangs. But {hint[0].lower()}{hint[1:]} It is there to be evaluated."
    step = first_difference(found[0]["rows"]["held_out"], wanted)
    if step is not None:
        mine = found[0]["rows"]["held_out"][step].item()
        return f"Rank 0 logs a held-out loss of {mine:.4f}; that of all held-out texts is {wanted[step]:.4f}."
    return None


@exercise("08.bug6")
def local_norm() -> str | None:
    """The weights of one process that clips by the norm of the whole gradient."""
    found = results_of(6)
    if isinstance(found, str):
        return found
    right, weights = reference.clipped("all"), found[0]["weights"]
    if same(weights, reference.clipped("none").weights):
        return "Now the gradient is not clipped at all."
    if hint := rows_hint(found, "norm", len(right.norms)):
        return hint
    right_norms = all(first_difference(values["rows"]["norm"], right.norms) is None for values in found)
    if same(weights, right.weights):
        return None if right_norms else "The weights are right, and the norm in the rows is not that of all ranks."
    norms = [values["rows"]["norm"][0].item() for values in found]
    if abs(norms[0] - norms[1]) < 1e-6:
        return (
            f"Both ranks log a norm of {norms[0]:.3f} in step 0, and the weights are still wrong: by which norm is "
            "each rank's shard scaled?"
        )
    return (
        f"In step 0 one rank clips by a norm of {norms[0]:.3f}, and the other one by {norms[1]:.3f}. The norm of the "
        f"whole gradient is {right.norms[0]:.3f}: whose parameters does each rank have?"
    )


@exercise("08.bug7")
def optimizer_before_wrapping() -> str | None:
    """The losses of one process with all data, and sharded parameters."""
    found = results_of(7)
    if isinstance(found, str):
        return found
    right = reference.decayed()
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    if not found[0]["counts"].get("reduce-scatter, backward"):
        return "The model is not sharded any more: keep the calls of `fully_shard`."
    if is_flat(found):
        return (
            f"The loss is {found[0]['rows']['loss'][0]:.4f} in each step. Which tensors does the optimizer have, and "
            "which has the model?"
        )
    if earliest_difference(found, right.losses):
        return "The loss moves, but otherwise than with SGD, this learning rate and these two groups: keep them."
    return None


@exercise("08.bug8")
def gradients_that_nobody_clears() -> str | None:
    """The weights of a training whose norm has no gradients of steps before in it."""
    found = results_of(8)
    if isinstance(found, str):
        return found
    weights = found[0]["weights"]
    right = reference.cross_attention("frozen")
    if hint := rows_hint(found, "norm", len(right.norms)):
        return hint
    if is_flat(found):
        return "Nothing is learned: the gradients of the cross-attention are gone before the optimizer's step."
    if not same(weights, right.weights, "decoder."):
        return "The decoder's weights have changed, and they are not to: the optimizer must not have them."
    if same(weights, reference.cross_attention("unclipped").weights):
        return "The gradient is not clipped any more. The limit is right; what does the norm count that it should not?"
    if any(same(weights, reference.cross_attention(way).weights) for way in ("frozen", "cleared")):
        return None
    norms = found[0]["rows"]["norm"]
    return (
        f"The norm goes from {norms[0]:.2f} to {norms.max():.2f}. `optimizer.zero_grad()` clears the gradients of the "
        "optimizer's parameters. Which parameters have a gradient, too? Or better: why do they have one?"
    )


@exercise("08.bug9")
def swapped_gradients() -> str | None:
    """The losses and weights of one process with all data."""
    return in_both_orders(9, hint_for_swapped)


def hint_for_swapped(found: Ranks, moved: bool) -> str | None:
    """Return the hint for one run of script 9."""
    right = reference.without_pictures(moved)
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    different = earliest_difference(found, right.losses)
    if different is None:
        return None
    step, rank = different
    mine = found[rank]["rows"]["loss"][step].item()
    if step == 0:
        return (
            f"The loss of rank {rank} in step 0 is {mine:.4f}, and that of its batch is {right.losses[rank][0]:.4f}: "
            "nothing was learned yet, so forward computes something else than before."
        )
    start = reference.weights_of(reference.parts_of(9)["build"]())
    if same(found[0]["weights"], start, "projector."):
        return "The projector does not learn any more. It gets its gradient from one rank alone, but it gets one."
    return (
        f"The loss of rank {rank} in step {step} is {mine:.4f}, and with one process it is "
        f"{right.losses[rank][step]:.4f}. The losses of step 0 are right, so the gradients of step 0 are not. In which "
        "order does each rank reduce its units?"
    )


@exercise("08.bug10")
def tied_weights() -> str | None:
    """The training of one process, with one table for the embedding and the head."""
    import torch

    found = results_of(10)
    if isinstance(found, str):
        return found
    right, weights = reference.tied(), found[0]["weights"]
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    for name in ("embedding.weight", "head.weight"):
        if not torch.equal(weights[name], found[1]["weights"][name]):
            return (
                f"{name} is not the same on both ranks: nobody averages the gradient of a parameter that FSDP ignores."
            )
    if not torch.equal(weights["embedding.weight"], weights["head.weight"]):
        return (
            "No error any more. But the embedding and the head are two tables now, and they have to be one parameter."
        )
    if torch.equal(weights["embedding.weight"], reference.parts_of(10)["build"]().embedding.weight):
        return "No error any more. But the table that both share does not learn."
    if earliest_difference(found, right.losses):
        return "No error any more, and one table. But the losses are not those of one process with all data."
    return None


@exercise("08.bug11")
def uneven_batches() -> str | None:
    """The weights of one process with all rows."""
    found = results_of(11)
    if isinstance(found, str):
        return found
    weights = found[0]["weights"]
    if same(weights, reference.uneven("same")):
        return None
    if same(weights, reference.uneven("dropped")):
        return "The last batch is left out, so five of the 21 rows are never learned: use all of them."
    if same(weights, reference.uneven("sum")):
        return (
            "Each rank gives the sum over its rows, so the gradient grows with the batch. It must be a mean over rows."
        )
    if same(weights, reference.uneven("half")):
        return "Now each row counts the same, and each step is half as long: FSDP still takes the mean over the ranks."
    return (
        "The weights are not those of one process. Is each of the 21 rows learned once in an epoch? In the last batch "
        "the ranks have different numbers of rows. How much does a row of each count in the mean over the ranks?"
    )


@exercise("08.bug12")
def resume() -> str | None:
    """The losses of a training that was never stopped."""
    found = results_of(12)
    if isinstance(found, str):
        return found
    right = reference.unbroken("all")
    if hint := rows_hint(found, "loss", len(right.losses[0])):
        return hint
    different = earliest_difference(found, right.losses)
    if different is None:
        return resumed_hint(found)
    step, rank = different
    stop = reference.parts_of(12)["STOP_AT"]
    mine = found[rank]["rows"]["loss"]
    if step < stop:
        return f"The loss of step {step} has changed, which is before the checkpoint: leave the first part as it is."
    if step > stop:
        return (
            f"The weights are restored: the loss of step {stop} is right. That of step {step} is {mine[step]:.4f}, and "
            f"without a stop it is {right.losses[rank][step]:.4f}: what else does an optimizer need to go on?"
        )
    if earliest_difference(found, reference.unbroken("optimizer").losses) is None:
        return "The optimizer is restored, and the model still has the weights with which it was made."
    return (
        f"The loss of step {step} is {mine[step]:.4f}, and without a stop it is {right.losses[rank][step]:.4f}. "
        "`dcp.load` has filled the tensors in `state`. Are these the model's and the optimizer's?"
    )


def resumed_hint(ranks: Ranks) -> str | None:
    """Return the hint for a run of script 12 that has the right losses."""
    if any(values.get("went_on") for values in ranks):
        return (
            "The losses are right, since nothing was resumed: the model at the end is the one that was saved. A new "
            "process has a new model and a new optimizer: keep the second `start`."
        )
    if not all(values.get("is_copy", True) for values in ranks):
        return (
            "The losses are right. But the checkpoint has the model's own tensors: if training goes on while they are "
            "written, it has weights of two steps. Keep the copy in `state_of`."
        )
    return None


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
