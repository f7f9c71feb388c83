"""The rules of FSDP1 and DDP for a unit; those of FSDP2 are in core/unit_rules.py. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..core.plan import ITEMSIZE, Param, Unit, UnitKind
from ..core.unit_rules import UnitRules
from ..params import FSDPParams

ALIGNMENT = 16
"""Bytes to which FSDP1 aligns each parameter in its flat one with `use_orig_params` (torch's `_flat_param.py`)."""


class WholeUnits(UnitRules):
    """DDP: every rank holds all of each unit."""

    shards = False
    ignores = dict.fromkeys(("sharding_strategy", "frozen_policy"), "every rank holds all weights")


class FlatUnits(UnitRules):
    """FSDP1: a sharded unit is one flat parameter."""

    flat = True

    def with_bytes(self, unit: Unit, fsdp: FSDPParams, shard: int) -> Unit:
        """Return the unit with the bytes of its one flat parameter, padded to the ranks."""
        if not unit.sharded or not unit.params:
            return super().with_bytes(unit, fsdp, shard)
        itemsize = at_rest = numel = 0
        for p in unit.params:
            itemsize = max(itemsize, ITEMSIZE[unit.computed_dtype(p)])
            at_rest = max(at_rest, ITEMSIZE[p.dtype])
        # With `use_orig_params`, each parameter in it is aligned.
        alignment = 1 if fsdp.use_orig_params is False else ALIGNMENT // itemsize
        for p in unit.params:
            numel = ceil(numel / alignment) * alignment + p.numel
        numel = ceil(numel / shard) * shard
        reduced = 0
        if any(p.learns for p in unit.params):
            reduced = numel * ITEMSIZE[fsdp.reduce_dtype.torch_name]
        return replace(
            unit, bytes_at_rest=numel // shard * at_rest, unsharded_bytes=numel * itemsize, reduced_bytes=reduced
        )

    def gradient_params(self, unit: Unit) -> list[Param]:
        """Return the parameters that get gradients: in a mixed unit all, as views of the flat parameter."""
        if unit.sharded and unit.kind is UnitKind.MIXED:
            return [p for p in unit.params if p.trainable or p.is_floating]
        return super().gradient_params(unit)

    def gradient_bytes(self, unit: Unit, shard: int) -> int:
        """Return the bytes of this rank's part of the flat gradient, of frozen parameters as well."""
        if unit.sharded and unit.reduced_bytes:
            return unit.bytes_at_rest
        return super().gradient_bytes(unit, shard)

    def trained_bytes(self, unit: Unit, shard: int) -> int:
        """Return the bytes that the optimizer updates: not of the frozen part of a mixed unit's shard."""
        if unit.sharded and unit.kind is UnitKind.MIXED:
            return unit.bytes_at_rest * unit.trainable_numel // unit.numel
        return super().trained_bytes(unit, shard)

    def cast_shard(self, unit: Unit, shard: int) -> int:
        """Return the bytes of a cast copy of the shard: all of the flat one (_flat_param.py, pre_unshard)."""
        nbytes = super().cast_shard(unit, shard)
        return unit.unsharded_bytes // shard if nbytes else 0


WHOLE, FLAT = WholeUnits(), FlatUnits()
