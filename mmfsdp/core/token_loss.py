"""The loss of a language model's head, computed piece by piece: the logits of all positions are never there at once.

The logits of a step are often its largest tensors: 8,192 positions times 128,259 tokens, three times in fp32, are
12.6 GB. Here the head computes the logits of a few positions, their losses and their gradients, and then uses the same
memory for the next positions. It does so inside its own `forward`, so DDP, FSDP1 and FSDP2 gather its weight as always.

N positions, D width, K rows of the head's matrix that count, E logits from elsewhere, such as those of new tokens, R
positions that the loss is computed for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from .step_batch import IGNORED_LABEL, MIN_PIECE

PIECE_BYTES = 1 << 29
"""Size of a piece's logits in fp32: 1,024 positions of 128,000 tokens. With fewer, parts of a GPU would be idle."""
ALIGNMENT = 8
"""A row of logits is a multiple of so many numbers: products on a GPU are several times slower for other lengths."""
FP16_SCALE = 256.0
"""Factor of the gradients of logits while they are in fp16, whose smallest number is 6e-8. They are at most 1, and
their products with the head's matrix stay far below fp16's largest number, 65,504."""


SWITCHED_OFF = "model.loss_in_head is false"
"""The `whole_logits` of a model that nobody has asked to compute its loss in the head."""


def computes_loss_in_head(model: nn.Module) -> bool:
    """Return True if a head in the model computes the loss where the model is given labels.

    A model's attribute `whole_logits` is the reason why it does not; "" if it does.
    """
    if getattr(model, "whole_logits", SWITCHED_OFF):
        return False
    return any(isinstance(module, LossLinear) for module in model.modules())


@contextmanager
def sums_of_heads(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what heads of the model return while they compute losses, each the sum of its losses, ()."""
    sums: list[Tensor] = []

    def collect(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.dim() == 0:  # else logits
            sums.append(output.detach())

    heads = [module for module in model.modules() if isinstance(module, LossLinear)]
    handles = [head.register_forward_hook(collect) for head in heads]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


class LossLinear(nn.Linear):
    """A language model's head. With targets it returns the sum of their losses in place of logits.

    `nn.Linear`'s class is replaced by this one (`module.__class__ = LossLinear`), so that the object stays, and with it
    tied weights, names and references.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        extra: Callable[[], Tensor] | None = None,
        known: int | None = None,
    ) -> Tensor:
        """Return logits (..., V) of x (..., D); with targets the sum of their losses, () in fp32. See `token_loss`.

        targets: (...) the token to predict at each position or, with positions, (R,) at these. extra: returns (..., E).
        """
        if targets is None:
            return super().forward(x)
        extra_rows = None if extra is None else extra().to(x.dtype).flatten(0, -2)
        known = len(self.weight) if known is None else known
        return token_loss(x.flatten(0, -2), self.weight, self.bias, extra_rows, targets.flatten(), positions, known)


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    extra: Tensor | None,
    targets: Tensor,
    positions: Tensor | None,
    known: int,
) -> Tensor:
    """Return the sum, () in fp32, of the cross-entropies of the targets that are not IGNORED_LABEL.

    Products are computed in the dtype of hidden, all else in fp32, as for whole logits; in fp64 all is fp64.
    torch has a function of its own, `torch.nn.functional.linear_cross_entropy` (torch 2.13). Without options it
    computes whole logits. With them, in bf16, it rounds the loss itself to bf16 (11.000 for 11.169), and its operator
    has no formula of FLOPs.

    Args:
        hidden: (N, D), the last hidden states.
        weight: (K or more, D), the head's matrix.
        bias: (K or more,), or None.
        extra: (N, E), logits of more tokens, which follow the K; or None.
        targets: (R,) int64, the tokens to predict, below K + E; IGNORED_LABEL for none.
        positions: (R,) int64, the rows of hidden that predict them; default all, so that R = N. A position may occur
            several times if at most one of its targets counts.
        known: K.
    """
    tensors = (hidden, weight, bias, extra, targets, positions)
    if has_torch_function(tensors):  # so that a trace sees this as one function of its parameters
        return handle_torch_function(token_loss, tensors, hidden, weight, bias, extra, targets, positions, known)
    device = hidden.device.type
    # DDP's mixed precision. Autocast does not see into a Function, and torch has none for the meta device.
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        extra = None if extra is None else extra.to(dtype)
    return _TokenLoss.apply(hidden, weight, bias, extra, targets, positions, known, torch.is_grad_enabled())


class _TokenLoss(torch.autograd.Function):
    """Computes the gradients of the sum in forward, while a piece's probabilities are there; backward scales them.

    So backward needs neither logits nor the head's matrix. Nothing is computed for a frozen matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        extra: Tensor | None,
        targets: Tensor,
        positions: Tensor | None,
        known: int,
        with_gradients: bool,
    ) -> Tensor:
        """Return the sum of the losses."""
        inputs = (hidden, weight, bias, extra)
        gradients = Gradients(inputs, [with_gradients and need for need in ctx.needs_input_grad[:4]])
        extra_columns = 0 if extra is None else extra.shape[1]
        buffer = piece_buffer(hidden, len(targets), known + extra_columns)
        losses = torch.empty(len(targets), dtype=sum_dtype(hidden), device=hidden.device)
        for start in range(0, len(targets), max(len(buffer), 1)):
            piece = slice(start, start + len(buffer))
            rows = piece if positions is None else positions[piece]
            target = targets[piece, None]  # (rows, 1)
            counts = target != IGNORED_LABEL
            # A position without a target may hold anything, such as NaN after attention to nothing but padding.
            x = torch.where(counts, hidden[rows], 0)  # (rows, D)
            logits = buffer[: len(x)]  # (rows, K + E, padded)
            more = None if extra is None else torch.where(counts, extra[rows], 0)
            write_logits(logits, x, weight[:known], None if bias is None else bias[:known], more)
            losses[piece] = replace_by_gradient(logits, target, counts, gradients.scale if gradients.any else None)
            gradients.add(rows, x, logits, weight[:known], extra_columns)
        ctx.save_for_backward(*gradients.tensors)
        ctx.scale, ctx.dtypes = gradients.scale, [None if t is None else t.dtype for t in inputs]
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of the inputs."""
        # With a dim: a product of a tensor in 16 bits and a number, (), would round the number to 16 bits first, and
        # with it every gradient in the same direction.
        factor = gradient[None] / ctx.scale  # in fp32, as the sum
        scaled: list[Tensor | None] = []
        for part, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled.append(None if part is None else (part * factor).to(dtype))
        return *scaled, None, None, None, None


def sum_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of sums and of the loss: fp32; fp64 if hidden is in fp64, as for finite differences."""
    return torch.promote_types(hidden.dtype, torch.float32)


def piece_buffer(hidden: Tensor, rows: int, columns: int) -> Tensor:
    """Return memory for the logits of a piece (rows of a piece, columns, padded), in the dtype of hidden."""
    padded = -(-columns // ALIGNMENT) * ALIGNMENT
    rows_in_piece = PIECE_BYTES // (4 * padded) // MIN_PIECE * MIN_PIECE
    return hidden.new_empty(min(rows, max(MIN_PIECE, rows_in_piece)), padded)


def write_logits(logits: Tensor, x: Tensor, table: Tensor, bias: Tensor | None, extra: Tensor | None) -> None:
    """Write the logits (rows, K + E, padded) of x (rows, D); those of the padding are -inf."""
    known = len(table)
    if bias is None:
        torch.mm(x, table.T, out=logits[:, :known])
    else:
        torch.addmm(bias, x, table.T, out=logits[:, :known])
    columns = known
    if extra is not None:
        columns += extra.shape[1]
        logits[:, known:columns] = extra
    if columns < logits.shape[1]:
        logits[:, columns:] = -torch.inf


def replace_by_gradient(logits: Tensor, target: Tensor, counts: Tensor, scale: float | None) -> Tensor:
    """Return the losses (rows,) in fp32 or fp64.

    With a scale, write the gradient of their sum, times the scale, over the logits. target, counts: (rows, 1).
    """
    log_probabilities = torch.log_softmax(logits, dim=1, dtype=sum_dtype(logits))
    place = target.clamp(min=0)
    losses = log_probabilities.gather(1, place).neg_().mul_(counts)[:, 0]
    if scale is not None:
        # The gradient of a loss by the logits: the probabilities, less 1 at the target.
        probabilities = log_probabilities.exp_()
        probabilities.scatter_add_(1, place, torch.full_like(place, -1, dtype=probabilities.dtype))
        torch.mul(probabilities, counts * scale, out=logits)
    return losses


class Gradients:
    """The gradients of hidden, weight, bias and extra, summed over pieces; None for those that nobody needs."""

    def __init__(self, inputs: tuple[Tensor | None, ...], needed: list[bool]) -> None:
        """inputs: as in `token_loss`; needed: for each of them, whether its gradient is."""
        self.scale = FP16_SCALE if inputs[0].dtype is torch.float16 else 1.0  # type: ignore[union-attr]
        self.tensors: list[Tensor | None] = []
        for place, (tensor, need) in enumerate(zip(inputs, needed, strict=True)):
            # Weight and bias sum over pieces in fp32, as a product over all rows does. Rows without loss stay 0.
            dtype = sum_dtype(inputs[0]) if place in (1, 2) else None  # type: ignore[arg-type]
            is_needed = need and tensor is not None
            self.tensors.append(torch.zeros_like(tensor, dtype=dtype) if is_needed else None)  # type: ignore[arg-type]
        self.any = any(tensor is not None for tensor in self.tensors)

    def add(self, rows: slice | Tensor, x: Tensor, logits: Tensor, table: Tensor, extra_columns: int) -> None:
        """Add what a piece gives: x (rows, D), the gradient of its logits (rows, K + E, padded), table (K, D)."""
        of_hidden, of_weight, of_bias, of_extra = self.tensors
        known = len(table)
        of_known, of_more = logits[:, :known], logits[:, known : known + extra_columns]
        if of_hidden is not None:
            add_rows(of_hidden, rows, of_known @ table)
        if of_weight is not None:
            of_weight[:known] += of_known.T @ x
        if of_bias is not None:
            of_bias[:known] += of_known.sum(dim=0, dtype=of_bias.dtype)
        if of_extra is not None:
            add_rows(of_extra, rows, of_more)


def add_rows(total: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Write or add a part (R, ...) to the rows of a total (N, ...)."""
    if isinstance(rows, slice):
        total[rows] = part
    else:
        total.index_add_(0, rows, part)  # a position that fills up the last piece occurs again, with 0
