"""The checks of a loop of one's own: two steps in one process, watched, and compared with the loss of the batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from ...core.collectives import gather_json
from ...core.freeze import frozen_modules
from ...core.guards import list_all
from ..data.own_random import seed_all
from .differences import GENERATORS, digest, parts, random_digests, rank_factors
from .lines import NOTE, OK, WRONG, Line
from .trial import Trial
from .watched_step import ModuleModes, WatchedStep

CLOSE = 0.02
"""Relative difference below which a gradient is taken for a multiple of another one."""


@dataclass(frozen=True)
class WatchedLoop:
    """Two steps of a loop, on a copy of the model without dropout, and the gradient of the batch's loss before them."""

    steps: Sequence[WatchedStep]
    of_loss: Mapping[str, Tensor]
    random_after: Sequence[int]
    """Digests of the generators' states after the steps; they began with the seed of the rank."""


def watch_loop(trial: Trial) -> WatchedLoop:
    """Do two steps of the person's loop over this rank's batch, and watch them. Every rank must call it."""
    model = copy.deepcopy(trial.plain)
    optimizer = trial.loop.optimizer(model)
    steps = [WatchedStep(model, optimizer), WatchedStep(model, optimizer)]
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0  # else two forwards of a batch have two losses
    # The gradient that a step of the whole batch should have, before the loop runs.
    trial.loop.loss(model, trial.batch).backward()
    of_loss = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    model.zero_grad(set_to_none=True)
    seed_all(trial.rank)
    for watched in steps:
        with watched:
            trial.loop.step(model, optimizer, trial.batch)
    return WatchedLoop(steps, of_loss, random_digests())


def check_batches(trial: Trial, loop: WatchedLoop) -> Line:
    """Every rank has another batch."""
    seen: dict[tuple[int, ...], int] = {}
    for rank, batch in enumerate(trial.loop.batches):
        # A batch of no tensors has no digests: nobody can say whether two are equal.
        digests = tuple(digest(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        if digests and digests in seen:
            words = f"ranks {seen[digests]} and {rank} have the same batch, so that they do the same work"
            fix = "give each rank its own rows, as DistributedSampler(dataset, num_replicas=ranks, rank=rank) does"
            return Line(WRONG, "batches", words, fix)
        seen[digests] = rank
    return Line(OK, "batches", "every rank has another batch")


def check_zero_grad(trial: Trial, loop: WatchedLoop) -> Line:
    """A step begins without gradients of the step before it, and keeps those of all its backwards."""
    first, second = loop.steps
    if second.left_over:
        words = f"step 2 begins with the gradients of step 1, in {parts(second.left_over, second.trainable)}"
        return Line(WRONG, "zero_grad", words, "call optimizer.zero_grad() once in each step")
    if first.dropped:
        words = "gradients are set to zero between two micro-batches: only the last of them counts"
        return Line(WRONG, "zero_grad", words, "call optimizer.zero_grad() once in each step, after optimizer.step()")
    if first.backwards and first.steps and not first.grads_at_step:
        words = "gradients are gone when the optimizer steps"
        return Line(WRONG, "zero_grad", words, "call zero_grad() before backward() or after step(), not in between")
    if first.changed_later:
        words = f"gradients are changed after optimizer.step(), in {parts(first.changed_later, first.trainable)}"
        return Line(WRONG, "zero_grad", words, "clip and scale them between backward() and step()")
    return Line(OK, "zero_grad", "a step begins without gradients, and keeps those of all its backwards")


def check_accumulation(trial: Trial, loop: WatchedLoop) -> Line:
    """The gradient of a step is that of the mean loss over all of its micro-batches."""
    first = loop.steps[0]
    count = len(first.backwards)
    total, of_loss = first.total, loop.of_loss
    if not count or not of_loss:
        return Line(NOTE, "accumulation", "not checked: a step has no backward")
    # As for shards of one rank: 0 stands for a gradient that is no multiple of the other.
    [factor] = rank_factors(total, of_loss, 1, CLOSE / 10) or [0.0]
    if _is(factor, 1.0):
        return Line(OK, "accumulation", f"the gradient of {count} backward(s) is that of the batch's loss")
    if count > 1 and _is(factor, count):
        words = f"the losses of {count} micro-batches are added: the gradient is {count} times that of their mean"
        return Line(WRONG, "accumulation", words, f"divide each loss by the number of micro-batches: (loss / {count})")
    # With several micro-batches, a factor of the ranks cannot be told from one of their number.
    if count == 1 and (_is(factor, trial.ranks) or _is(factor, 1 / trial.ranks)):
        how = "divided" if factor < 1 else "multiplied"
        words = f"the loss is {how} by the number of ranks: the gradient is {factor:.3g} times that of the batch's loss"
        fix = "leave the mean over ranks to FSDP and DDP, which divide gradients by the number of ranks"
        return Line(WRONG, "accumulation", words, fix)
    # No multiple of the gradient: then perhaps each micro-batch was averaged by itself.
    if not factor and count > 1 and len(first.tokens) == count and _is_mean_of_means(first, of_loss):
        words = f"micro-batches of {list_of(first.tokens)} label tokens count the same: their tokens do not"
        fix = "divide the sum of the losses of all micro-batches by the number of their label tokens"
        return Line(WRONG, "accumulation", words, fix)
    how = f"{factor:.3g} times" if factor else "not"
    return Line(NOTE, "accumulation", f"the gradient of a step is {how} that of the batch's loss: the step adds to it")


def _is(factor: float, expected: float) -> bool:
    return abs(factor - expected) < CLOSE * expected


def list_of(numbers: Sequence[int]) -> str:
    """Return numbers in words: 3, 4 and 5."""
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _is_mean_of_means(step: WatchedStep, of_loss: Mapping[str, Tensor]) -> bool:
    """Return True if the gradients of micro-batches, weighted by their label tokens, are the gradient of the loss."""
    weighted: dict[str, Tensor] = {}
    # The loop has divided by the number of micro-batches; the loss divides by all their tokens.
    share = len(step.tokens) / max(sum(step.tokens), 1)
    for grads, tokens in zip(step.backwards, step.tokens, strict=True):
        for name, grad in grads.items():
            weighted[name] = weighted.get(name, 0.0) + grad * tokens * share
    return bool(rank_factors(weighted, of_loss, 1, CLOSE / 10))


def check_modes(trial: Trial, loop: WatchedLoop) -> Line:
    """Trained parts are in train mode in each step, and dropout and batch norms of frozen parts are not."""
    first, second = loop.steps
    if any(first.modes.of_model) and second.modes.of_model and not any(second.modes.of_model):
        words = "step 2 trains in eval mode, in which dropout is off and batch norms do not learn"
        return Line(WRONG, "mode", words, "call mmfsdp.train_mode(model) after an evaluation, before the next step")
    return line_of_modes(trial.plain, [first.modes, second.modes])


def line_of_modes(model: nn.Module, noted: Sequence[ModuleModes]) -> Line:
    """Return the line for the modes in which dropout and batch norms have run."""
    frozen = {id(module) for part in frozen_modules(model) for module in part.modules()}
    in_eval, in_train = [], []
    for name, module in model.named_modules():
        modes = set().union(*(each.modes.get(name, set()) for each in noted))
        is_norm = isinstance(module, _NormBase)
        if id(module) in frozen and True in modes:
            in_train.append((name, is_norm))
        # A norm without parameters that train may stay in eval mode.
        elif id(module) not in frozen and False in modes and not _is_frozen_norm(module):
            in_eval.append(name)
    norms = [name for name, is_norm in in_train if is_norm]
    fix = "call mmfsdp.train_mode(model) in place of model.train(): it keeps frozen parts in eval mode"
    if in_eval:
        words = f"trained in eval mode, in which it is off or does not learn: {list_all(in_eval)}"
        return Line(WRONG, "mode", words, "call mmfsdp.train_mode(model) before a step; no forward should call eval()")
    if norms:
        words = f"frozen, but in train mode, so that its running statistics change: {list_all(norms)}"
        return Line(WRONG, "mode", words, fix)
    if in_train:
        words = f"dropout of frozen parts is on: {list_all([name for name, _ in in_train])}"
        return Line(NOTE, "mode", f"{words}; to switch it off, {fix}")
    return Line(OK, "mode", "what trains is in train mode, and frozen parts are in eval mode")


def _is_frozen_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not any(p.requires_grad for p in module.parameters())


def check_seeds(trial: Trial, loop: WatchedLoop) -> Line:
    """Ranks draw different random numbers. Every rank must call it, after `Trial.run`."""
    after = gather_json(list(loop.random_after))
    if len(after) == 1:
        return Line(NOTE, "seeds", "not checked: there is one rank")
    for place, generator in enumerate(GENERATORS):
        # The steps began with different seeds, so equal states were set in between.
        if len({digests[place] for digests in after}) == 1:
            words = f"a step sets the state of {generator}: all ranks, and all steps, draw the same numbers"
            return Line(WRONG, "seeds", words, "set no seed in a step, or one of the rank and the number of the step")
    seeds = gather_json(trial.random_after_setup)
    same = [generator for place, generator in enumerate(GENERATORS) if len({each[place] for each in seeds}) == 1]
    drawn = gather_json(trial.draws)
    if any(GENERATORS[place] in same for place in drawn[0]):
        words = "all ranks have the same seed, and draw the same dropout masks"
        fix = "set a seed of the rank once the weights are there: torch.manual_seed(seed + rank) at the end of `wrap`"
        return Line(WRONG, "seeds", words, fix)
    return Line(OK, "seeds", "ranks draw different random numbers" if drawn[0] else "a forward draws no random numbers")


LOOP_CHECKS = (check_batches, check_zero_grad, check_accumulation, check_modes)
"""Checks of a loop, in their order. Every rank calls each."""
