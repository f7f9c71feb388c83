"""Bytes of one unit on a rank: its parameters, gradients, optimizer states and casts. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..params import Backend, FSDPParams
from .plan import ITEMSIZE, Param, Unit, UnitKind, WrapPlan

FSDP1_ALIGNMENT = 16
"""Bytes to which FSDP1 aligns each parameter in its flat one with `use_orig_params` (torch's `_flat_param.py`)."""


def with_bytes(unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
    """Return the unit with the bytes that each rank holds, gathers and reduces."""
    if fsdp.effective_backend is Backend.FSDP1 and unit.sharded and unit.params:
        return _with_flat_bytes(unit, fsdp, shard)
    if not unit.sharded:
        shard = 1
    at_rest = unsharded = reduced = 0
    for p in unit.params:
        # FSDP2 shards the first dim of each parameter by itself, padded to the ranks.
        numel = p.padded(shard)
        at_rest += numel // shard * ITEMSIZE[p.dtype]
        unsharded += numel * ITEMSIZE[unit.computed_dtype(p)]
        # A sharded unit is reduced whole: a parameter without a gradient counts as zeros (same_parts.py).
        if p.learns or (unit.sharded and p.trainable and any(other.learns for other in unit.params)):
            # DDP and replicated units reduce in the dtype of the parameters.
            reduced += numel * ITEMSIZE[fsdp.reduce_dtype.torch_name if unit.sharded else p.dtype]
    return replace(unit, bytes_at_rest=at_rest, unsharded_bytes=unsharded, reduced_bytes=reduced)


def _with_flat_bytes(unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
    """Return an FSDP1 unit with the bytes of its one flat parameter, padded to the ranks."""
    itemsize = at_rest = numel = 0
    for p in unit.params:
        itemsize = max(itemsize, ITEMSIZE[unit.computed_dtype(p)])
        at_rest = max(at_rest, ITEMSIZE[p.dtype])
    # With `use_orig_params`, each parameter in it is aligned.
    alignment = 1 if fsdp.use_orig_params is False else FSDP1_ALIGNMENT // itemsize
    for p in unit.params:
        numel = ceil(numel / alignment) * alignment + p.numel
    numel = ceil(numel / shard) * shard
    reduced = 0
    if any(p.learns for p in unit.params):
        reduced = numel * ITEMSIZE[fsdp.reduce_dtype.torch_name]
    return replace(
        unit, bytes_at_rest=numel // shard * at_rest, unsharded_bytes=numel * itemsize, reduced_bytes=reduced
    )


class UnitBytes(NamedTuple):
    """Bytes of a unit on one rank, beside those that its fields have."""

    optimizer: int
    gradients: int
    """Reduced ones."""
    unreduced: int
    """Whole gradients, as backward computes them."""
    cast_shard: int
    """A copy of its shard in the dtype of compute, where that differs from the dtype at rest."""
    cast_gradient: int
    """FSDP1: a copy of its flat gradient in the dtype of the reduction."""


class UnitBytesTable:
    """Keep the UnitBytes of units, so that they are counted once in the hundreds of walks of a search.

    One table is for plans that differ only in their units.
    """

    def __init__(self, plan: WrapPlan) -> None:
        self._plan = plan
        # By identity: to hash a unit takes longer than to count its bytes. Units are kept, so that no identity returns.
        self._kept: dict[int, tuple[Unit, UnitBytes]] = {}

    def of(self, unit: Unit) -> UnitBytes:
        """Return the bytes of a unit."""
        kept = self._kept.get(id(unit))
        if kept is None:
            kept = self._kept[id(unit)] = (unit, unit_bytes(self._plan, unit))
        return kept[1]


def unit_bytes(plan: WrapPlan, unit: Unit) -> UnitBytes:
    """Count the bytes of a unit."""
    unreduced = 0
    for p in gradient_params(plan, unit):
        if not p.unused:
            unreduced += p.numel * ITEMSIZE[unit.computed_dtype(p)]
    # Shards are cast to the dtype of compute before they are sent (_fsdp_param.py, all_gather_inputs; _flat_param.py,
    # pre_unshard).
    cast_shard = 0
    for p in unit.params:
        if p.dtype != unit.computed_dtype(p):
            cast_shard += p.padded(plan.shard) // plan.shard * ITEMSIZE[unit.computed_dtype(p)]
    if cast_shard and plan.backend is Backend.FSDP1:
        cast_shard = unit.unsharded_bytes // plan.shard  # all of the flat one
    # FSDP1's flat gradient is in the dtype of compute (_runtime_utils.py, _post_backward_hook).
    reduce_dtype = plan.fsdp.reduce_dtype.torch_name
    is_cast = any((unit.compute_dtype or p.dtype) != reduce_dtype for p in unit.params)
    return UnitBytes(
        optimizer=optimizer_bytes(plan, unit),
        gradients=gradient_bytes(plan, unit),
        unreduced=unreduced,
        cast_shard=cast_shard,
        cast_gradient=unit.reduced_bytes if is_cast else 0,
    )


def optimizer_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Return the bytes of the optimizer's states: of AdamW two moments (Kingma and Ba 2015) as large as what trains."""
    return round(plan.optimizer_states * trained_bytes(plan, unit))


def trained_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Return the bytes of this rank's trainable parameters, which the optimizer updates."""
    if plan.backend is Backend.FSDP1 and unit.sharded and unit.kind is UnitKind.MIXED:
        return unit.bytes_at_rest * unit.trainable_numel // unit.numel  # not of the frozen part of its shard
    return gradient_bytes(plan, unit)


def gradient_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Return the bytes of this rank's reduced gradients, in the dtype of the parameters."""
    if not unit.reduced_bytes:
        return 0
    if plan.backend is Backend.FSDP1 and unit.sharded:
        return unit.bytes_at_rest  # one flat gradient, of its frozen parameters too
    shards = plan.shard if unit.sharded else 1
    return sum(p.padded(shards) // shards * ITEMSIZE[p.dtype] for p in unit.params if p.learns)


def gradient_params(plan: WrapPlan, unit: Unit) -> list[Param]:
    """Return the parameters that get gradients: in a mixed unit of FSDP1 all, as views of one flat parameter."""
    flat = plan.backend is Backend.FSDP1 and unit.sharded and unit.kind is UnitKind.MIXED
    return [p for p in unit.params if p.trainable or (flat and p.is_floating)]
