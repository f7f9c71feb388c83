"""Bytes that wrapping itself takes beside parameters: what the estimate adds up and AUTO chooses by."""

from __future__ import annotations

from collections.abc import Iterable

from ..params import Backend, FSDPParams
from .units import ITEMSIZE, Unit, WrapPlan


def shard_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Bytes of this rank's part of a unit's trainable parameters."""
    parts = plan.shard if unit.sharded else 1
    if plan.backend is Backend.FSDP1 and unit.sharded:
        if unit.kind == "mixed" and plan.fsdp.use_orig_params is not False:  # states of the trainable part alone
            return unit.held_bytes * unit.trainable_numel // unit.numel
        return unit.held_bytes if unit.reduced_bytes else 0
    return sum((p.padded(parts) // parts) * ITEMSIZE[p.dtype] for p in unit.params if p.trainable and not p.idle)


def gradient_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Bytes of this rank's part of a unit's reduced gradients: FSDP1 has zeros for what is frozen in a mixed unit."""
    one_gradient = plan.backend is Backend.FSDP1 and unit.sharded and unit.reduced_bytes
    return unit.held_bytes if one_gradient else shard_bytes(plan, unit)


def gathered_peak(plan: WrapPlan) -> int:
    """Units that stay gathered to the end of forward, and the largest two of the others (one runs, one comes next)."""
    sharded = [u for u in plan.units if u.sharded]
    stay = sum(u.gathered_bytes for u in sharded if not u.reshard_after_forward)
    others = sorted((u.gathered_bytes for u in sharded if u.reshard_after_forward), reverse=True)
    return stay + sum(others[:2])


def gather_buffer(plan: WrapPlan, unit: Unit) -> int:
    """What a gather passes through: FSDP2 copies out of one flat buffer, FSDP1 gathers in place."""
    return unit.gathered_bytes if plan.backend is Backend.FSDP2 else 0


def cast_bytes(plan: WrapPlan, unit: Unit) -> int:
    """What a rank's part is cast to before it is gathered, where it does not rest as it computes."""
    if not unit.compute_dtype or all(p.dtype == unit.compute_dtype for p in unit.params):
        return 0
    return unit.gathered_bytes // plan.shard


def reduce_buffer(plan: WrapPlan) -> int:
    """Whole gradients of the largest unit, and the buffer that they are reduced from."""
    return max((u.reduced_bytes + whole_gradients(u) for u in plan.units if u.sharded), default=0)


def whole_gradients(unit: Unit) -> int:
    """Bytes of a unit's gradients before they are reduced."""
    return sum(p.numel * ITEMSIZE[unit.compute_dtype or p.dtype] for p in unit.params if p.trainable and not p.idle)


def reductions(unit: Unit, micro_steps: int) -> int:
    """How often a step of so many micro-steps reduces a unit's gradients."""
    return (1 + (unit.reduced_twice and micro_steps > 1)) * (unit.reduced_bytes > 0)


def ahead_in_forward(units: Iterable[Unit], fsdp: FSDPParams) -> dict[int, list[int]]:
    """Order of a unit -> orders of those that are sent for as it begins forward (`forward_prefetch`): the next one, if
    it is freed after forward; with FSDP2 what stays is sent for as the model begins, since it takes no more room so."""
    moved = sorted((u for u in units if u.sharded and u.gathers_forward), key=lambda u: u.order)
    if not fsdp.forward_prefetch:
        return {}
    stays = [u.order for u in moved if fsdp.effective_backend is Backend.FSDP2 and not u.reshard_after_forward]
    found = {u.order: [after.order] for u, after in zip(moved, moved[1:], strict=False) if after.order not in stays}
    return found | {0: stays + found.get(0, [])}
