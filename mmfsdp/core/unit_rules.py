"""Count the bytes of a unit on one rank: its parameters, gradients, optimizer states and casts. Imports no torch.

`UnitRules` has FSDP2's rules. Those of FSDP1 and DDP are in mmfsdp/backends/rules.py; `plan.rules` returns a plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ..params import FSDPParams
from .plan import ITEMSIZE, Param, Unit, WrapPlan


class UnitRules:
    """Says what a wrapper makes of a unit: here each parameter is sharded by itself, as by FSDP2.

    Other wrappers have a subclass each. Nobody else asks which wrapper it is.
    """

    shards = True
    """Each rank holds a part of most units. Otherwise it holds all, and DDP waits for every gradient."""
    ignores: Mapping[str, str] = {}
    """Fields of FSDPParams that change nothing in a plan, each with the reason."""
    flat = False
    """A sharded unit is one flat parameter, gathered in place, whose gradient is made anew in each micro-step."""

    @property
    def by_parameter(self) -> bool:
        """Each parameter is sharded on its first dim, and gathered through a buffer for the whole unit."""
        return self.shards and not self.flat

    def with_bytes(self, unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
        """Return the unit with the bytes that each rank holds, gathers and reduces. shard: ranks of that axis."""
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

    def gradient_params(self, unit: Unit) -> list[Param]:
        """Return the parameters that get gradients."""
        return [p for p in unit.params if p.trainable]

    def gradient_bytes(self, unit: Unit, shard: int) -> int:
        """Return the bytes of this rank's reduced gradients, in the dtype of the parameters."""
        if not unit.reduced_bytes:
            return 0
        shards = shard if unit.sharded else 1
        return sum(p.padded(shards) // shards * ITEMSIZE[p.dtype] for p in unit.params if p.learns)

    def trained_bytes(self, unit: Unit, shard: int) -> int:
        """Return the bytes of this rank's trainable parameters, which the optimizer updates."""
        return self.gradient_bytes(unit, shard)

    def cast_shard(self, unit: Unit, shard: int) -> int:
        """Return the bytes of a copy of its shard in the dtype of compute; 0 where that is the dtype at rest."""
        nbytes = 0
        for p in unit.params:
            # Shards are cast before they are sent (torch's _fsdp_param.py, all_gather_inputs).
            if p.dtype != unit.computed_dtype(p):
                nbytes += p.padded(shard) // shard * ITEMSIZE[unit.computed_dtype(p)]
        return nbytes


BY_PARAMETER = UnitRules()


def with_bytes(unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
    """Return the unit with the bytes that each rank holds, gathers and reduces, by the rules of its backend."""
    counted: Unit = fsdp.effective_backend.rules.with_bytes(unit, fsdp, shard)
    return counted


class UnitBytes(NamedTuple):
    """Bytes of a unit on one rank, beside those that its fields have."""

    optimizer: int
    """States of the optimizer: of AdamW two moments (Kingma and Ba 2015) as large as what trains."""
    gradients: int
    """Reduced gradients: this rank's part of them."""
    unreduced: int
    """Whole gradients, as backward computes them."""
    cast_shard: int
    """A copy of the unit's shard in the dtype of compute, where that differs from the dtype at rest."""
    cast_gradient: int
    """A copy of a flat gradient in the dtype of the reduction."""


def unit_bytes(plan: WrapPlan, unit: Unit) -> UnitBytes:
    """Count the bytes of a unit."""
    rules: UnitRules = plan.rules
    unreduced = 0
    for p in rules.gradient_params(unit):
        if not p.unused:
            unreduced += p.numel * ITEMSIZE[unit.computed_dtype(p)]
    # FSDP1's flat gradient is in the dtype of compute (_runtime_utils.py, _post_backward_hook).
    reduce_dtype = plan.fsdp.reduce_dtype.torch_name
    is_cast = any((unit.compute_dtype or p.dtype) != reduce_dtype for p in unit.params)
    return UnitBytes(
        optimizer=round(plan.optimizer_states * rules.trained_bytes(unit, plan.shard)),
        gradients=rules.gradient_bytes(unit, plan.shard),
        unreduced=unreduced,
        cast_shard=rules.cast_shard(unit, plan.shard),
        cast_gradient=unit.reduced_bytes if is_cast else 0,
    )


class UnitBytesTable:
    """Keep the UnitBytes of units, so that they are counted once in the hundreds of walks of a search.

    One table is for plans that differ only in their units.
    """

    def __init__(self, plan: WrapPlan) -> None:
        self._plan = plan
        # By identity: to hash a unit takes longer than to count its bytes. The unit is kept with them: were it freed,
        # another one could get its identity.
        self._kept: dict[int, tuple[Unit, UnitBytes]] = {}

    def of(self, unit: Unit) -> UnitBytes:
        """Return the bytes of a unit."""
        kept = self._kept.get(id(unit))
        if kept is None:
            kept = self._kept[id(unit)] = (unit, unit_bytes(self._plan, unit))
        return kept[1]
