"""Check what `train_step` takes: micro-batches, as objects or as mappings, and outputs with a loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from statistics import mode
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..params import ParamError
from .collectives import gather_through_store, rank
from .model_record import record_of
from .names import class_name, unwrapped
from .step_batch import IGNORED_LABEL, MappingBatch, StepBatch

OWN_LABELS = ("ForMaskedLM", "ForTokenClassification")
"""transformers' names of losses that predict the label of each position. A causal model predicts the next one."""


def as_batches(model: nn.Module, micro_batches: Sequence[StepBatch | Mapping[str, Any]]) -> list[StepBatch]:
    """Return micro-batches as batches. In a model's first step, compare them with the other ranks'.

    Raises ParamError, then on all ranks, if a rank has more of them, or other sources.
    """
    if isinstance(micro_batches, Mapping):  # its items would be the keys
        raise ParamError("micro_batches", "is one mapping; give a list: train_step(model, [batch], optimizer)")
    batches: list[StepBatch] = []
    for batch in micro_batches:
        if not isinstance(batch, Mapping) and not hasattr(batch, "label_tokens"):
            kind = type(batch).__name__
            raise ParamError(
                "micro_batches",
                f"holds a {kind}; give a mapping of the forward's arguments, such as a dict, or a StepBatch",
            )
        batches.append(MappingBatch(batch) if isinstance(batch, Mapping) else batch)
    if not record_of(model).first_step_checked:  # the first step
        compare_over_ranks(batches)
        tell_of_missing_labels(model, batches)
    return batches


def compare_over_ranks(batches: Sequence[StepBatch]) -> None:
    """Raise ParamError if ranks have different numbers of micro-batches, or other sources. Every rank must call it.

    Otherwise the collectives of one rank would wait for another rank's until they time out.
    """
    sources = list(dict.fromkeys(batch.source for batch in batches))
    of_ranks = gather_through_store([len(batches), sources])
    numbers = [number for number, _ in of_ranks]
    usual = mode(numbers)
    different = [f"rank {other} has {number}" for other, number in enumerate(numbers) if number != usual]
    if different:
        problem = (
            f"{', '.join(different[:8])}, the others have {usual}; every rank must have the same number in each step"
        )
        raise ParamError("micro_batches", problem)
    if not usual:
        raise ParamError("micro_batches", "is empty; a step needs at least one")
    for other, (_, names) in enumerate(of_ranks):
        if names != of_ranks[0][1]:
            raise ParamError(
                "micro_batches",
                f"rank {other} has the sources {', '.join(names)}, rank 0 has {', '.join(of_ranks[0][1])}; every rank "
                "must have the same, in the same order",
            )


def tell_of_missing_labels(model: nn.Module, batches: Sequence[StepBatch]) -> None:
    """Warn on rank 0 if mappings have no labels, so that the loss is weighed by samples."""
    inner = unwrapped(model)
    if rank() > 0 or hasattr(inner, "count_label_tokens"):
        return
    if any(isinstance(batch, MappingBatch) and "labels" not in batch.mapping for batch in batches):
        warnings.warn(
            f"{class_name(inner)}: the batch has no labels, so train_step takes the loss for a mean over samples, the "
            "rows, and weighs ranks and micro-batches by them; give it labels, or give the model a method "
            "count_label_tokens(batch) that returns what its mean is over",
            stacklevel=2,
        )


def label_tokens(model: nn.Module, batch: StepBatch) -> int:
    """Return the tokens that the model's loss is a mean over.

    An encoder-decoder and a masked language model predict every label, a causal language model all but the first of a
    sequence. A model that does otherwise has a method `count_label_tokens(batch)`; `lint_loss` finds those without.
    """
    if getattr(batch, "blank", False):  # a rank without usable samples takes part in the step, and learns nothing
        return 0
    inner: Any = unwrapped(model)  # DDP does not pass attributes on
    if hasattr(inner, "count_label_tokens"):
        return inner.count_label_tokens(batch.mapping if isinstance(batch, MappingBatch) else batch)
    is_encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if is_encoder_decoder or getattr(inner, "loss_type", "") in OWN_LABELS:
        labels = batch.inputs().get("labels")
        if labels is not None:
            return int((labels != IGNORED_LABEL).sum())
    return batch.label_tokens


def loss_of(output: Any) -> Any:
    """Return the loss in the output of a forward, or None: `output.loss`, `output["loss"]`, `output[0]`, or itself."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        return output[0] if output else None
    return getattr(output, "loss", None)


class NoLogits:
    """Stands for the logits of an output that has a place for them, and none in it."""


def logits_of(output: Any) -> torch.Tensor | NoLogits | None:
    """Return the logits in the output of a forward: `output.logits` or `output["logits"]`; None if it has no such."""
    if isinstance(output, Mapping) and "logits" in output:
        logits = output["logits"]
    elif hasattr(output, "logits"):
        logits = output.logits
    else:
        return None
    return NoLogits() if logits is None else logits


def is_scalar_loss(loss: Any) -> bool:
    """Return True for what a step can train with: a tensor without dims. What `loss_of` returns may be logits."""
    return isinstance(loss, torch.Tensor) and loss.dim() == 0


def check_loss(model: nn.Module, loss: Any) -> None:
    """Raise ParamError if a forward has returned no loss, or one that is no scalar."""
    if is_scalar_loss(loss):
        return
    name = class_name(model)
    if loss is None:
        raise ParamError("model", f"{name} returns no loss, and train_step needs one; give it labels, or another head")
    if not isinstance(loss, torch.Tensor):
        raise ParamError("model", f"{name} returns a loss of type {type(loss).__name__}; it must be a tensor")
    problem = f"{name} returns a loss of shape {tuple(loss.shape)}; it must be a scalar, the mean over what is learned"
    raise ParamError("model", problem)


def lint_loss(
    model: nn.Module,
    loss: torch.Tensor,
    logits: torch.Tensor | NoLogits | None,
    labels: torch.Tensor | None,
    tokens: int,
) -> None:
    """Warn on rank 0 if the loss is not a mean over as many label tokens as `train_step` counts, or cannot be checked.

    `train_step` weighs each rank's loss by its label tokens. A mean over anything else would give another loss than one
    process has. logits: (B, L, V) or, of a head that computes the loss, the sum of the losses, (); see `token_loss`.
    """
    if rank() > 0 or hasattr(model, "count_label_tokens") or logits is None or labels is None or not tokens:
        return
    if isinstance(logits, NoLogits):
        warnings.warn(
            f"{class_name(model)}: its output has no logits, so nobody has checked that its loss is a mean over the "
            f"{tokens} label tokens that train_step counts, and by which it weighs ranks and micro-batches: have it "
            "return logits in its first step, or give the model a method count_label_tokens(batch) that returns what "
            "its mean is over",
            stacklevel=2,
        )
        return
    if logits.dim() == 0:
        is_mean = equal_losses(logits.detach() / tokens, loss.detach())
    elif labels.dim() == 2 and logits.shape[:-1] == labels.shape:
        is_mean = is_token_mean(loss, logits, labels, tokens)
    else:
        return
    if not is_mean:
        warnings.warn(
            f"{class_name(model)}: its loss is not a mean over the {tokens} label tokens that train_step counts, and "
            "by which it weighs ranks and micro-batches: switch a router's loss off (output_router_logits), or give "
            "the model a method count_label_tokens(batch) that returns what its mean is over",
            stacklevel=2,
        )


@torch.no_grad()
def is_token_mean(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, tokens: int) -> bool:
    """Return False if a loss is not the mean cross-entropy of logits (B, L, V) over so many of the labels (B, L).

    A label belongs to the position before it, as in causal models, or to its own.
    """
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        return False  # a placeholder outside of the vocabulary, which cross_entropy must not be given
    for shift in (1, 0):
        total = torch.zeros_like(loss, dtype=torch.float32)
        for row, targets in zip(logits, labels, strict=True):  # row by row: logits are large
            row = row[: len(row) - shift].float()
            total += cross_entropy(row, targets[shift:], ignore_index=-100, reduction="sum")
        counted = int((labels[:, shift:] != -100).sum())
        if counted == tokens and equal_losses(total / tokens, loss):
            return True
    return not bool(torch.isfinite(loss))


def equal_losses(mean: torch.Tensor, loss: torch.Tensor) -> bool:
    """Return True if a mean in fp32, (), is a model's loss in its own dtype."""
    rounding = max(1e-4, torch.finfo(loss.dtype).eps)
    return bool(torch.isclose(mean.float(), loss.float(), rtol=rounding))
