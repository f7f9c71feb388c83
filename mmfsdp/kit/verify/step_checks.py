"""The checks of a few steps: each is a function of a Trial that returns a Line. CHECKS is their table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...core.collectives import gather_json
from ...core.guards import list_all
from ...core.names import plain_name, tied_names
from ...core.parameters import hook_names
from ...core.units import decays
from .differences import TOLERANCE, differences, parts, rank_factors, total_difference
from .finite_differences import check_derivatives
from .forward_checks import check_head_loss
from .label_checks import line_of_copies
from .lines import NOTE, OK, WRONG, Line
from .no_picture import check_no_picture
from .silent import check_trained
from .trial import STEPS, Trial

LATER = 10
"""Times the tolerance after a step of Adam, which makes a full step of rounding where a gradient is 0 in theory."""
MAX_UNMOVED = 0.5
"""Share of a parameter's values that a step may leave as they were."""


def check_weights(trial: Trial) -> Line:
    """Every rank starts from rank 0's weights."""
    if not trial.other_weights:
        return Line(OK, "weights", "all ranks start from the weights of rank 0")
    names = parts(trial.other_weights, trial.params)
    fix = "give all ranks one seed before the model is built, or broadcast rank 0's weights, before it is sharded"
    return Line(WRONG, "weights", f"ranks start from different weights in {names}", fix)


def check_buffers(trial: Trial) -> Line:
    """Buffers and plain tensors are equal on all ranks, before the steps and after them."""
    at_start = different_names(trial.buffers_at_start)
    wrapped = different_names(trial.buffers_at_end)
    # Wrapping may have given all ranks rank 0's; a plain attribute it does not see.
    buffers = {name for name, _ in trial.plain.named_buffers()}
    wrong = sorted({name for name in at_start if name not in buffers} | set(wrapped))
    if not wrong:
        return Line(OK, "buffers", f"{len(trial.buffers_at_end)} buffers and other tensors are equal on all ranks")
    fix = (
        "compute it in the same way on every rank, when the model is built, and keep it by register_buffer: wrapping "
        "gives every rank rank 0's buffers (fsdp.sync_module_states), not other attributes"
    )
    return Line(WRONG, "buffers", f"not the same on all ranks: {list_all(wrong)}", fix)


def different_names(digests: dict[str, int]) -> list[str]:
    """Return the names whose digests differ between ranks. Every rank must call it."""
    by_rank = gather_json(digests)
    names = sorted(set().union(*by_rank))
    return [name for name in names if len({values.get(name) for values in by_rank}) > 1]


def check_ties(trial: Trial) -> Line:
    """Tied parameters are one parameter, before and after wrapping."""
    shared = shared_storages(trial.plain)
    if shared:
        fix = "assign the Parameter itself (head.weight = embedding.weight), not its data"
        words = f"{list_all(shared)} share their memory, but are not one Parameter: sharding separates them"
        return Line(WRONG, "ties", words, fix)
    apart = apart_by_config(trial.plain)
    if apart:
        fix = "tie them again after a part was replaced (model.tie_weights()), or set tie_word_embeddings to false"
        return Line(WRONG, "ties", f"the configuration ties {apart}, and in the model they are two parameters", fix)
    before = tied_names(trial.plain)
    after = [{plain_name(name, trial.model) for name in names} for names in tied_names(trial.model).values()]
    lost = []
    for names in before.values():
        # FSDP1 has flat parameters, among which nothing is tied.
        if after and not any(set(names) <= group for group in after):
            lost.append(names)
    if lost:
        fix = "give fully_shard both modules in one list: fully_shard([embedding, head])"
        return Line(WRONG, "ties", f"tied before wrapping, and not tied after it: {list_all(lost[0])}", fix)
    return Line(OK, "ties", f"{len(before)} tied parameters stay tied" if before else "no parameter is tied")


def shared_storages(model: nn.Module) -> list[str]:
    """Return the names of different parameters that share memory."""
    owners: dict[int, str] = {}
    shared = []
    for name, p in model.named_parameters():
        storage = p.untyped_storage()
        if p.is_meta or not storage.nbytes():
            continue
        other = owners.setdefault(storage.data_ptr(), name)
        # The views of one flat buffer share its storage, too. Only what begins at one address is one parameter twice.
        if other != name and p.data_ptr() == model.get_parameter(other).data_ptr():
            shared += [other, name]
    return list(dict.fromkeys(shared))


def apart_by_config(model: nn.Module) -> str:
    """Return the embedding and the head that a configuration of transformers ties, and that are two; or ""."""
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        head, table = module.get_output_embeddings(), module.get_input_embeddings()
        # The text part has the flag: the configuration of a model with a vision tower nests it.
        tied = getattr(module.config.get_text_config(), "tie_word_embeddings", False)
        has_both = isinstance(getattr(head, "weight", None), nn.Parameter) and hasattr(table, "weight")
        # Tables of different shapes are of different vocabularies, which no flag can tie.
        if tied and has_both and head.weight is not table.weight and head.weight.shape == table.weight.shape:
            return f"the embedding and the head of {name or type(module).__name__}"
    return ""


def check_loss(trial: Trial) -> Line | None:
    """The loss is a mean, so that ranks' losses can be averaged. Only where batches can be joined."""
    loop = trial.loop
    if loop.joined is None or loop.counts is None:
        return None
    model = trial.loop.build().eval()
    with torch.no_grad():
        # In eval mode, so that dropout gives the batches alone and joined the same losses.
        losses = [float(loop.loss(model, batch)) for batch in loop.batches]
        joined = float(loop.loss(model, loop.joined))
    counts = [loop.counts(model, batch) for batch in loop.batches]
    tokens, rows = [count for count, _ in counts], [count for _, count in counts]

    def is_joined(value: float) -> bool:
        return abs(joined - value) <= TOLERANCE * max(abs(joined), 1e-6)

    if is_joined(weighted_mean(losses, tokens)):
        return Line(OK, "loss", "a mean: all rows together have the mean of the ranks' losses")
    if is_joined(sum(losses)):
        fix = "divide it by the number of its label tokens, or rows (reduction='mean')"
        words = f"a sum: batches with {losses[0]:.4g} and {losses[1]:.4g} together have {joined:.4g}"
        return Line(WRONG, "loss", f"{words}, so the gradient grows with the batch and depends on the ranks", fix)
    if is_joined(weighted_mean(losses, rows)):
        fix = "give the model a method count_label_tokens(batch) that returns the number of rows"
        return Line(WRONG, "loss", "a mean over rows, but it is weighted by label tokens", fix)
    return line_of_copies(trial) or Line(NOTE, "loss", "not a mean over label tokens or rows")


def weighted_mean(values: list[float], weights: list[int]) -> float:
    """Return the weighted mean."""
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1)


def check_optimizer(trial: Trial) -> Line:
    """The optimizer holds what trains, and nothing else."""
    # By identity: FSDP2 puts new parameters in the place of those that an optimizer was made of.
    held = {id(p) for group in trial.optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in trial.params.items()}
    frozen = [name for name, p in trial.params.items() if id(p) in held and not p.requires_grad]
    missing = [name for name, p in trial.params.items() if p.requires_grad and id(p) not in held]
    strangers = len(held - names.keys())
    if strangers:
        fix = "make it after the model is wrapped, from the wrapped model's parameters, before any forward"
        words = f"{strangers} of its parameters are not in the wrapped model, which it does not train"
        return Line(WRONG, "optimizer", words, fix)
    if frozen:
        fix = "give it only [p for p in model.parameters() if p.requires_grad]"
        words = f"it holds frozen parameters: {parts(frozen, trial.params)}; it may keep states for them and decay them"
        return Line(WRONG, "optimizer", words, fix)
    if missing:
        fix = "give it every parameter with requires_grad, or freeze these"
        return Line(WRONG, "optimizer", f"it lacks {parts(missing, trial.params)}, which would never change", fix)
    text = f"it holds all {len(held)} trainable parameters, and no others"
    decayed = decayed_vectors(trial)
    if decayed:
        words = f"{text}; weight decay pulls norms, biases and the like to zero: {parts(decayed, trial.trainable)}"
        return Line(NOTE, "optimizer", words)
    return Line(OK, "optimizer", text)


def decayed_vectors(trial: Trial) -> list[str]:
    """Return the trainable parameters that weight decay is usually not for, and that the optimizer decays."""
    names = {id(p): name for name, p in trial.plain.named_parameters()}
    decayed = []
    for group in trial.plain_optimizer.param_groups:
        for p in group["params"] if group.get("weight_decay") else ():
            name = names.get(id(p), "")
            if name and not decays(trial.plain, [name], ndim=p.ndim):
                decayed.append(name)
    return decayed


def check_settings(trial: Trial) -> Line:
    """All ranks have the same optimizer and settings, before the steps and after them. Every rank must call it."""
    for when, settings in (("", trial.settings_at_start), (f" after {STEPS} steps", trial.settings_at_end)):
        of_first, *of_others = gather_json(settings)
        for rank, of_other in enumerate(of_others, start=1):
            if of_other == of_first:
                continue
            words = f"rank {rank} has {len(of_other)} groups, and rank 0 {len(of_first)}"
            for ours, theirs in zip(of_first, of_other, strict=False):
                differing = [key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key)]
                if differing:
                    key = differing[0]
                    words = f"{key} is {ours.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}{when}"
                    break
            fix = "make the optimizer and its schedule of the same numbers on every rank"
            return Line(WRONG, "settings", words, fix)
    return Line(OK, "settings", "the optimizer's settings are the same on all ranks")


def check_hooks(trial: Trial) -> Line | None:
    """A hook of a parameter is still there after wrapping, and sees what it was written for."""
    hooked = dict(trial.hooks)
    for name, p in trial.params.items():
        # A hook that `wrap` has added to a sharded parameter sees a shard.
        if isinstance(p, DTensor) and hook_names(p):
            hooked.setdefault(name, hook_names(p))
    # FSDP1 moves all parameters into flat ones, whose views keep no hook.
    is_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in trial.model.modules())
    lost = [name for name in hooked if name in trial.params and (is_fsdp1 or isinstance(trial.params[name], DTensor))]
    if not hooked:
        return None
    if lost:
        words = f"{lost[0]}: has a hook, {list_all(hooked[lost[0]])}, which never runs, or sees a shard, once this"
        fix = "freeze the parameter in place of masking its gradient, or let DDP or ignored_params keep it whole"
        return Line(WRONG, "hooks", f"{words} parameter is sharded", fix)
    return Line(OK, "hooks", f"the hooks of {len(hooked)} parameters stay, since these are not sharded")


def check_precision(trial: Trial) -> Line | None:
    """A step changes the parameters that are stored in 16 bits: an update may be smaller than their precision."""
    unmoved = trial.steps_alone[0].unmoved
    lost = [name for name, share in unmoved.items() if share > MAX_UNMOVED]
    if lost:
        dtype = str(trial.plain.get_parameter(lost[0]).dtype).removeprefix("torch.")
        words = f"a step leaves most values of {parts(lost, trial.trainable)} as they were: it is smaller than the"
        fix = "store what trains in float32, and compute in 16 bits by mixed precision (MixedPrecisionPolicy, autocast)"
        return Line(WRONG, "precision", f"{words} precision of {dtype}", fix)
    # autocast keeps the cast copies of leaves that require a gradient, and casts others each time.
    cast = [name for name, p in trial.plain.named_parameters() if id(p) in trial.precision.cast]
    if cast:
        words = f"autocast casts {parts(cast, dict(trial.plain.named_parameters()))} in each forward, since it keeps"
        return Line(
            NOTE, "precision", f"{words} only the casts of what trains; frozen matrices can be stored in 16 bits"
        )
    if not unmoved:
        return None
    return Line(OK, "precision", f"a step changes the {len(unmoved)} trainable tensors that are stored in 16 bits")


def check_gradients(trial: Trial) -> Line:
    """In the first step each trainable parameter has, on its own shard, the gradient of one process."""
    ours, theirs = trial.steps[0].grads, trial.steps_alone[0].grads
    if not ours:
        return Line(WRONG, "gradients", "step made no step of the optimizer", "call optimizer.step() in it")
    # A gradient with other placements would be added to the wrong part of its parameter.
    misplaced = []
    for name, p in trial.params.items():
        if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            misplaced.append(name)
    if misplaced:
        return Line(WRONG, "gradients", f"not sharded as their parameters: {list_all(misplaced)}", "wrap them alike")
    found = differences(ours, theirs)
    wrong = [name for name, difference in found.items() if difference > trial.tolerance]
    largest = max(found.values(), default=0.0)
    if not wrong:
        words = f"{len(found)} trainable tensors have, on their own shards, the gradient of one process"
        return Line(OK, "gradients", f"{words} (largest difference {largest:.0e})")
    # A wrong divisor is the most frequent fault, and only scales: name it before anything else.
    factors = rank_factors(ours, theirs, trial.ranks, trial.tolerance)
    if any(abs(factor - 1) > trial.tolerance for factor in factors):
        each = ", ".join(f"{factor:.3g}" for factor in factors)
        words = f"they are those of one process, multiplied on ranks 0 and 1 by {each}"
        if max(factors) - min(factors) > trial.tolerance:
            return Line(NOTE, "gradients", f"{words}; see the line norm")
        fix = "average over ranks what is a mean on each: do not sum it, nor multiply or divide it by the ranks"
        return Line(WRONG, "gradients", words, fix)
    # None at all points to code that runs on some ranks only, or to casts that FSDP has freed.
    missing = [name for name in wrong if ours.get(name) is None]
    why = f"; {parts(missing, found)} have none at all" if missing else ""
    fix = "look for code in the forward that runs on one rank only, and read the checks above"
    if missing and trial.precision.autocast:
        fix = "begin autocast anew for each forward: it keeps the casts of one under no_grad, which FSDP has freed"
    return Line(WRONG, "gradients", f"not those of one process in {parts(wrong, found)}{why}", fix)


def check_norm(trial: Trial) -> Line:
    """The norm that gradients are clipped by, and other figures of a step, are those of all ranks."""
    ours, theirs = trial.steps[0], trial.steps_alone[0]
    factors = rank_factors(ours.grads, theirs.grads, trial.ranks, trial.tolerance)
    fix = "add up the squares of all ranks' shards before the root: torch.nn.utils.clip_grad_norm_ does, on DTensors"
    if factors and max(factors) - min(factors) > trial.tolerance:
        words = "each rank clips by a norm of its own: it multiplies its shards by another number than the others"
        return Line(WRONG, "norm", words, fix)
    for name, value in theirs.figures.items():
        ours_value = ours.figures.get(name)
        if ours_value is not None and abs(ours_value - value) > trial.tolerance * max(abs(value), 1e-6):
            return Line(WRONG, "norm", f"{name} is {ours_value:.6g}, and in one process {value:.6g}", fix)
    if not theirs.figures:
        return Line(OK, "norm", "all ranks scale their shards by the same number")
    return Line(OK, "norm", f"{', '.join(theirs.figures)}: as in one process")


def check_evaluation(trial: Trial) -> Line:
    """A step begins with the weights that the step before it has left, whatever was evaluated in between."""
    gathered: set[str] = set()
    for step in trial.steps:
        gathered |= set(step.gathered)
    if gathered:
        words = f"a forward without a backward came before optimizer.step() and left {parts(gathered, trial.params)} "
        words += "gathered: the next step computes with the weights from before it"
        fix = "evaluate after optimizer.step(), or call model.reshard() on each unit after the evaluation"
        return Line(WRONG, "evaluation", words, fix)
    for number in range(1, min(len(trial.steps), STEPS)):
        difference = total_difference(trial.steps[number].grads, trial.steps_alone[number].grads)
        first = total_difference(trial.steps[0].grads, trial.steps_alone[0].grads)
        # Only where the first step agrees: else the lines above have named the fault.
        if difference > LATER * trial.tolerance and first <= trial.tolerance:
            words = f"the gradient of step {number + 1} differs from one process by {difference:.1e} of its norm, that"
            fix = "look at what runs between two steps: it changes weights, or leaves units gathered"
            return Line(WRONG, "evaluation", f"{words} of step 1 does not", fix)
    return Line(OK, "evaluation", "the next step begins with the new weights")


def check_frozen(trial: Trial) -> Line:
    """Frozen parameters keep every byte."""
    before, after = trial.frozen_before, trial.frozen_after
    changed = [name for name in before if before[name] != after[name]]
    if changed:
        fix = "take them out of the optimizer, and write to no frozen parameter in the step"
        return Line(WRONG, "frozen", f"changed by {STEPS} steps: {parts(changed, trial.params)}", fix)
    return Line(OK, "frozen", f"{len(before)} frozen tensors kept every byte through {STEPS} steps")


CHECKS: tuple[Callable[[Trial], Line | None], ...] = (
    check_weights,
    check_buffers,
    check_ties,
    check_loss,
    check_head_loss,
    check_optimizer,
    check_settings,
    check_hooks,
    check_precision,
    check_trained,
    check_derivatives,
    check_gradients,
    check_norm,
    check_evaluation,
    check_frozen,
    check_no_picture,  # last: ranks may hang in it
)
"""Checks of a step, in their order. Every rank calls each; one that returns None does not apply."""
