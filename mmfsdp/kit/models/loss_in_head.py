"""loss_in_head: have a language model's own head compute the loss, so that the logits are never there at once.

Nothing of transformers is replaced, and no forward is copied. A model of transformers computes its logits with its head
and hands them to `loss_function`, which transformers lets be set. Here hooks hand the labels to the head, which returns
the sum of the losses, (), in place of logits; `loss_function` turns that into the mean. A model that changes its logits
in between, or computes its loss in another way, is found by a forward without values, and keeps whole logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...core.fake_tensors import RealValues, copy_inputs, fake_mode, fake_model
from ...core.names import unwrapped
from ...core.step_batch import LOSS_POSITIONS
from ...core.token_loss import SWITCHED_OFF, LossLinear, computes_loss_in_head
from .backbones import run_on_meta
from .head_targets import OtherLossError, give_targets, mean_of, next_tokens, reason_after
from .media_model import MediaModel
from .tokens import ExtendedHead


def loss_in_head(model: Any, example: Mapping[str, Any] | None = None) -> str:
    """Have the head of a model compute its loss wherever the model is given labels, in place.

    The output then has a loss and no logits (`logits` is the sum of the losses); without labels it is as before. With
    `loss_positions=loss_positions(labels)` among its arguments, the head computes those positions alone. Call it before
    the model is wrapped. A second call changes nothing.

    Args:
        model: a causal model of transformers, a Flamingo or a MultimodalModel, with or without weights. Its head
            becomes one of a subclass of `nn.Linear`; names stay.
        example: keyword arguments of a forward with labels, to try it with. Default: a text of a few tokens.

    Returns:
        "" or, if the model keeps whole logits, the reason. It is kept as `model.whole_logits`, and the plan tells it.
    """
    if computes_loss_in_head(model):
        return ""
    if isinstance(model, MediaModel):
        model.whole_logits = _why_not_ours(model)
        return model.whole_logits
    reason = _take(model)
    if not reason:
        reason = _why_not_equal(model, example)
        if reason:
            _undo(model)
    model.whole_logits = reason
    return reason


def undo_loss_in_head(model: Any) -> None:
    """Have a model with labels compute its loss from the logits of all positions again, in place."""
    if not computes_loss_in_head(model):
        return
    if isinstance(model, MediaModel):
        head = model.language_model.get_output_embeddings()
        table = head.table if isinstance(head, ExtendedHead) else head
        table.__class__ = nn.Linear
    else:
        _undo(model)
    model.whole_logits = SWITCHED_OFF


class HeadLoss:
    """Hands a model's labels to its head, and makes the model's loss from what the head returns."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: gets its hooks and its loss function."""
        self.own_loss = model.loss_function
        self.in_head: list[RemovableHandle] = []
        """Hooks of the head, while a forward with labels runs."""
        self.hooks = [
            model.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            model.register_forward_hook(self.after_forward, always_call=True),
        ]
        model.loss_function = self.loss

    def before_forward(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hook the head if there are labels."""
        positions, labels = kwargs.pop(LOSS_POSITIONS, None), kwargs.get("labels")
        if labels is not None and not kwargs.get("logits_to_keep"):
            head = model.get_output_embeddings()
            self.in_head += give_targets(head, labels, next_tokens(labels), positions)
        return args, kwargs

    def after_forward(self, *_: Any) -> None:
        """Remove the hooks of the head, also after an error."""
        for hook in self.in_head:
            hook.remove()
        self.in_head.clear()

    def loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean loss. transformers calls this with what the head has returned."""
        if not self.in_head:
            return self.own_loss(logits, labels, *args, **kwargs)
        if kwargs.get("shift_labels") is not None:
            raise OtherLossError("the model shifts its labels itself")
        mean = mean_of(logits, labels)
        if kwargs.get("num_items_in_batch") is not None:  # transformers' trainer: a mean over several micro-batches
            return logits / kwargs["num_items_in_batch"]
        return mean


def _why_not_ours(model: MediaModel) -> str:
    """Make the head of the language model one that takes targets. Return "" or the reason why it cannot."""
    head = model.language_model.get_output_embeddings()
    table = head.table if isinstance(head, ExtendedHead) else head
    if type(table) is not nn.Linear:
        return f"the head of the language model is a {type(table).__name__}, not a Linear"
    table.__class__ = LossLinear
    model.whole_logits = ""
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    # With a cache, because without one transformers looks into position_ids, which meta tensors forbid.
    reason = reason_after(partial(run_on_meta, model, input_ids=ids, labels=ids, use_cache=True))
    if isinstance(reason, Exception):
        reason = f"the model failed with the loss in its head ({type(reason).__name__}: {reason})"
    if reason:
        table.__class__ = nn.Linear
    return reason


def _take(model: PreTrainedModel) -> str:
    """Make the head one that computes losses, and hook the model. Return "" or the reason why not."""
    head = model.get_output_embeddings()
    if head is None or type(unwrapped(head)) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a Linear"
    if getattr(model.loss_function, "__func__", model.loss_function) is not ForCausalLMLoss:
        return "its loss is not the one of a causal model"
    head.__class__ = LossLinear
    HeadLoss(model)
    return ""


def _undo(model: PreTrainedModel) -> None:
    """Give the model its whole logits back."""
    handler: HeadLoss = model.loss_function.__self__
    for hook in handler.hooks:
        hook.remove()
    model.loss_function = handler.own_loss
    model.get_output_embeddings().__class__ = nn.Linear


def _why_not_equal(model: PreTrainedModel, example: Mapping[str, Any] | None) -> str:
    """Run a forward without values. Return "" if the model takes its head's output for its loss as it is."""
    if example is None:
        ids = torch.ones(1, 4, dtype=torch.long, device="meta")
        reason = reason_after(partial(run_on_meta, model, input_ids=ids, labels=ids, use_cache=True))
        if not isinstance(reason, Exception):
            return reason
        # Some models read numbers out of tensors, or have operators without shapes on the meta device.
        ids = torch.ones(1, 4, dtype=torch.long)
        example = {"input_ids": ids, "labels": ids}
    mode = fake_mode()
    fake = fake_model(model, mode)
    with torch.random.fork_rng(devices=()), mode, RealValues():
        reason = reason_after(partial(fake, **copy_inputs(dict(example), mode)))
    if isinstance(reason, Exception):
        return f"its forward failed with the loss in the head ({type(reason).__name__}: {reason})"
    return reason
