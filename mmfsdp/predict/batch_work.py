"""Count the FLOPs of any batch of a run, from three traces: a run's batches differ in length and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..core.fake_tensors import tensors_of
from ..core.plan import WrapPlan
from ..core.step_batch import LOSS_POSITIONS
from ..core.token_loss import computes_loss_in_head
from .memory_events import record_memory

LENGTHS_APART = 64
"""Positions between the lengths that are traced. A multiple of 64, since some attention computes whole blocks."""


class BatchSizes(NamedTuple):
    """Holds what the FLOPs of a batch depend on."""

    rows: int
    """Texts, B."""
    length: int
    """Positions of each, padding included, L."""
    media: int
    """Numbers in its pictures, sounds, ..., m."""
    losses: int
    """Positions that the head computes a loss for, n; B * L where a batch does not name them."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> BatchSizes | None:
        """Return the sizes of a forward's keyword arguments; None if these are not texts with media.

        Two texts of different lengths, such as an encoder's and a decoder's, have no one length.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return None
        labels = inputs.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() == 2 and labels.shape != ids.shape:
            return None
        media = sum(tensor.numel() for tensor in tensors_of(inputs) if tensor.is_floating_point())
        positions = inputs.get(LOSS_POSITIONS)
        return cls(len(ids), ids.shape[1], media, ids.numel() if positions is None else len(positions))


class Flops(NamedTuple):
    """FLOPs of a forward and backward; see `WrapPlan.flops` and `WrapPlan.hardware_flops`."""

    needed: float
    """The numerator of MFU."""
    executed: float
    """The numerator of HFU."""


@dataclass(frozen=True)
class Polynomial:
    """FLOPs of batches: `media * m / m0 + B * (linear * L + quadratic * L ** 2) + loss * n`, m0 of the plan's example.

    Text costs as much for each position (products with weights), and for each pair of positions (self-attention). What
    does not depend on the length is the encoders' part: as much for each number of the media. A head that computes the
    loss costs as much for each of the n positions that have one; another is a part of `linear`.
    """

    media: float
    linear: float
    quadratic: float
    loss: float = 0.0

    @classmethod
    def through(cls, sizes: BatchSizes, flops: Sequence[float], loss: float) -> Polynomial:
        """Return the one with these FLOPs at the lengths L, L + LENGTHS_APART and L + 2 * LENGTHS_APART of sizes.

        Every position of them has a loss, which costs `loss`.
        """
        first, second, third = flops
        quadratic = (third - 2 * second + first) / (2 * LENGTHS_APART**2)
        linear = (second - first) / LENGTHS_APART - quadratic * (2 * sizes.length + LENGTHS_APART)
        media = first - linear * sizes.length - quadratic * sizes.length**2
        return cls(media, linear / sizes.rows - loss, quadratic / sizes.rows, loss)


@dataclass(frozen=True)
class BatchWork:
    """Counts the FLOPs of any batch of a run: those of the plan's example, carried over to the batch's own sizes.

    **The formula.** A plan traces a forward and backward of one example: B0 texts of L0 positions (`data.max_length`)
    with m0 numbers in the media, and counts its FLOPs, needed and executed, by `predict/work.py`: 2 for each
    multiplication with addition; matrix products, convolutions and attention, in full also where it is causal; no
    gradient of a frozen matrix, and no backward of a frozen encoder. Two more traces, of texts that are 64 and 128
    positions longer, give the three coefficients of a Polynomial, so that it holds for every length:

        flops(B, L, m, n) = media * m / m0 + B * (linear * L + quadratic * L ** 2) + loss * n

    n is the number of positions with a loss, where the head computes it (`model.loss_in_head`); a fourth trace, with a
    loss at half of the positions, gives `loss`. Without media in the example, the first part grows with B / B0 instead.
    Padding counts as text: it is computed. For pictures of one size this is exact, but for the scores of
    cross-attention over more pictures than in the example, which are taken to be as many as the example's (0.2 % of the
    FLOPs of ViT-L/14 with Llama-3.2-1B at five pictures). Of pictures of many sizes, the attention inside each is taken
    as proportional to its numbers.
    """

    sizes: BatchSizes
    """Sizes of the plan's example."""
    needed: Polynomial | None
    """None if longer texts cannot be traced; then only batches of the example's sizes are counted."""
    executed: Polynomial | None
    example: Flops
    parameters: int
    """All, frozen ones included."""

    @classmethod
    def of(cls, model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> BatchWork | None:
        """Trace the model, without weights, for the plan's example and for longer texts; None if that has no text."""
        sizes = BatchSizes.of(example)
        if sizes is None or not plan.flops:
            return None
        of_example, parameters = Flops(plan.flops, plan.hardware_flops), parameters_of(plan)
        try:
            longer = [traced(model, plan, lengthened(example, n * LENGTHS_APART)) for n in (1, 2)]
            losses = loss_flops(model, plan, example, of_example)
        except Exception:  # a table of positions that ends, for example
            return cls(sizes, None, None, of_example, parameters)
        polynomials = []
        for *flops, loss in zip(of_example, *longer, losses, strict=True):
            polynomials.append(Polynomial.through(sizes, flops, loss))
        return cls(sizes, polynomials[0], polynomials[1], of_example, parameters)

    def flops(self, inputs: Mapping[str, Any]) -> Flops | None:
        """Return the FLOPs of one micro-batch, given as its forward's keyword arguments; None if they are not known."""
        sizes = BatchSizes.of(inputs)
        if sizes == self.sizes:
            return self.example
        if sizes is None or self.needed is None or self.executed is None:
            return None
        return Flops(self._at(sizes, self.needed), self._at(sizes, self.executed))

    def flops_6n(self, inputs: Mapping[str, Any]) -> float:
        """Return what 6N gives: 6 FLOPs for each parameter, whatever is frozen, and position of the text."""
        return 6.0 * self.parameters * inputs["input_ids"].numel()

    def _at(self, sizes: BatchSizes, polynomial: Polynomial) -> float:
        share = sizes.media / self.sizes.media if self.sizes.media else sizes.rows / self.sizes.rows
        of_a_text = polynomial.linear * sizes.length + polynomial.quadratic * sizes.length**2
        return polynomial.media * share + sizes.rows * of_a_text + polynomial.loss * sizes.losses

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BatchWork:
        """Return what `to_dict` gave."""
        needed = Polynomial(**values["needed"]) if values["needed"] else None
        executed = Polynomial(**values["executed"]) if values["executed"] else None
        sizes, example = BatchSizes(*values["sizes"]), Flops(*values["example"])
        return cls(sizes, needed, executed, example, values["parameters"])


def traced(model: nn.Module, plan: WrapPlan, inputs: dict[str, Any]) -> Flops:
    """Return the FLOPs of a batch by a trace of it, which takes seconds for a large model."""
    work = record_memory(model, plan, inputs).work
    return Flops(work.flops, work.hardware_flops)


def loss_flops(model: nn.Module, plan: WrapPlan, example: dict[str, Any], of_example: Flops) -> Flops:
    """Return what the loss of one position costs, where the head computes it; else 0. of_example: of all positions."""
    if not computes_loss_in_head(model):
        return Flops(0, 0)
    positions = example["input_ids"].numel()
    half = traced(model, plan, {**example, LOSS_POSITIONS: torch.arange(positions // 2)})
    needed = of_example.needed - half.needed
    executed = of_example.executed - half.executed
    without = positions - positions // 2
    return Flops(needed / without, executed / without)


def parameters_of(plan: WrapPlan) -> int:
    """Return the number of all parameters, frozen ones included; of a quantized matrix, of its weights."""
    return sum(unit.numel for unit in plan.units)


def lengthened(inputs: dict[str, Any], positions: int) -> dict[str, Any]:
    """Return inputs whose texts are so many positions longer: the last position is repeated. Media stay."""
    rows, length = inputs["input_ids"].shape

    def longer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return value
        for axis in (1, value.dim() - 1):  # (B, L, ...); and positions of several axes, (3, B, L)
            if value.dim() > axis > 0 and value.shape[axis - 1 : axis + 1] == (rows, length):
                last = value.narrow(axis, length - 1, 1)
                return torch.cat([value, last.repeat_interleave(positions, dim=axis)], dim=axis)
        return value

    return tree_map(longer, dict(inputs))
