"""check_head_loss: a loss that the head computes piece by piece, compared with that of whole logits."""

from __future__ import annotations

import torch

from ...core.micro_batch import MappingBatch, loss_of
from ...core.token_loss import LOSS_POSITIONS, computes_loss_in_head
from ..models.loss_in_head import undo_loss_in_head
from .differences import TOLERANCE
from .lines import OK, WRONG, Line
from .trial import Trial


@torch.no_grad()
def check_head_loss(trial: Trial) -> Line | None:
    """The head's loss is that of the model's logits. Only where a head computes the loss (`model.loss_in_head`)."""
    model = trial.loop.build().eval()
    batch = trial.batch
    if not computes_loss_in_head(model) or not hasattr(batch, "inputs") and not isinstance(batch, dict):
        return None
    inputs = MappingBatch(batch).inputs() if isinstance(batch, dict) else batch.inputs()
    if inputs.get("labels") is None:
        return None
    in_head = float(loss_of(model(**inputs)))
    inputs.pop(LOSS_POSITIONS, None)
    undo_loss_in_head(model)
    of_logits = float(loss_of(model(**inputs)))
    if abs(in_head - of_logits) <= TOLERANCE * max(abs(of_logits), 1e-6):
        return Line(OK, "head loss", f"{in_head:.4g} in the head, as with whole logits")
    words = f"{in_head:.6g} in the head, and {of_logits:.6g} with whole logits"
    fix = "compute loss_positions from the labels of the same batch; else set model.loss_in_head to false"
    return Line(WRONG, "head loss", words, fix)
