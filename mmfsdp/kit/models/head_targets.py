"""Hand the tokens to predict to a language model's head, which returns the sum of their losses in place of logits.

Hooks do so for one forward. What the head returned is marked, so that a model that computes something with its logits
before its loss is found, and keeps whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...core.step_batch import IGNORED_LABEL


class OtherLossError(ValueError):
    """The loss of a model is not the one of its head's output, as it is, and the next tokens of its labels."""


def next_tokens(labels: Tensor) -> Tensor:
    """Return the token to predict at each position (B, L): the label of the next one; IGNORED_LABEL at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def give_targets(head: nn.Module, labels: Tensor, targets: Tensor, positions: Tensor | None) -> list[RemovableHandle]:
    """Have a head return the sum of the losses of targets (B, L), until the handles that are returned are removed.

    positions: those with a target, as `loss_positions` gives them; None for all. The sum knows the labels that it was
    computed for; see `mean_of`.
    """
    given = targets if positions is None else targets.flatten()[positions]

    def add_targets(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "targets": given, "positions": positions}

    def mark(_: nn.Module, __: Any, loss_sum: Any) -> None:
        loss_sum.mmfsdp_loss_of = labels, targets

    return [head.register_forward_pre_hook(add_targets, with_kwargs=True), head.register_forward_hook(mark)]


def mean_of(loss_sum: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, (), over the targets that count; 0 if there are none.

    Raises OtherLossError if the tensor is not the head's own, or belongs to other labels: the model has computed
    something with its logits or its labels, and what it made of the sum is no loss.
    """
    own_labels: Any
    targets: Any
    own_labels, targets = getattr(loss_sum, "mmfsdp_loss_of", (None, None))
    if own_labels is not labels:
        raise OtherLossError("the model changes its logits or its labels before it computes the loss")
    return loss_sum / (targets != IGNORED_LABEL).sum().clamp(min=1)


@contextmanager
def targets_in_head(language_model: Any, labels: Tensor, targets: Tensor, positions: Tensor | None) -> Iterator[None]:
    """Have the head of a language model return the sum of the losses of targets (B, L) in place of logits."""
    handles = give_targets(language_model.get_output_embeddings(), labels, targets, positions)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def reason_after(forward: Callable[[], Any]) -> str | Exception:
    """Run a forward. Return "" if its loss is the head's, the reason if it is not, or the error of one that failed."""
    try:
        forward()
    except OtherLossError as error:
        return str(error)
    except Exception as error:  # a model may do anything with a sum in the place of logits
        return error
    return ""
