"""Merge frozen layers to larger units (`frozen_unit_mib`), where the trace of an example shows that it costs no peak.

A frozen encoder has a unit for each of its layers, and backward needs none of them. Each unit costs an all-gather with
its latency, and hooks on the host. A larger one costs memory while it is gathered: at the beginning of a step, when
few activations are held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..core.guards import note
from ..core.plan import MemoryEvent, Unit, WrapPlan
from ..core.unit_rules import with_bytes
from ..core.units import unit_name
from ..params import TrainParams
from ..params.in_words import size
from .gathers import with_gathers
from .memory import step_walk
from .memory_events import with_recording
from .plan_cache import PlanCache

LARGER, NOT_LARGER = "larger-units", "no-larger-units"
"""Codes of the notes that say which units were merged, or why none were."""

Run = list[Unit]
"""Units that follow each other in forward, with nothing between them."""


def with_example(
    model: nn.Module, plan: WrapPlan, example: dict[str, Any], cache: PlanCache, train: TrainParams
) -> WrapPlan:
    """Return the plan with what an example shows: its memory events, its work, and the larger units that are asked for.

    Args:
        model: The plain model, quantized or not.
        plan: Its plan, without memory events.
        example: Keyword arguments of one forward.
        cache: Keeps the recording of the example.
        train: The step whose peak larger units must not raise.
    """
    return with_larger_units(with_recording(plan, cache.record(model, plan, example)), train)


def with_larger_units(plan: WrapPlan, train: TrainParams) -> WrapPlan:
    """Return a plan with memory events with the units that `frozen_unit_mib` allows, and a note that says which."""
    asked = plan.fsdp.frozen_unit_mib
    if asked is None:
        return plan
    before, limit = step_walk(plan, train).peak_bytes, asked * 2**20
    runs = list(_runs(plan))
    while chunks := _chunks(runs, limit):
        larger, largest = _merged(plan, chunks), max(map(_bytes_of, chunks))
        if step_walk(larger, train).peak_bytes <= before:
            words = f"frozen_unit_mib: {sum(map(len, chunks))} frozen units became {len(chunks)}, of at most "
            words += f"{size(largest)}; the predicted peak stays {size(before)}"
            if limit < asked * 2**20:
                words += ", and would grow with larger ones"
            return _told(larger, LARGER, words)
        limit = largest - 1
    if not runs:
        reason = "no two frozen units that are gathered in forward alone follow each other"
    elif not _chunks(runs, asked * 2**20):
        reason = f"no two that follow each other have {asked} MiB or less"
    else:
        reason = "the predicted peak would grow"
    return _told(plan, NOT_LARGER, f"frozen_unit_mib: no units are merged: {reason}")


def without_example(plan: WrapPlan) -> WrapPlan:
    """Return a plan that was made without an example, with a note where `frozen_unit_mib` needs one."""
    if plan.fsdp.frozen_unit_mib is None:
        return plan
    return _told(plan, NOT_LARGER, "frozen_unit_mib: no units are merged: only an example shows what is held when")


def _told(plan: WrapPlan, code: str, words: str) -> WrapPlan:
    """Return the plan with this note in the place of an earlier one."""
    others = [finding for finding in plan.lint if finding.code not in (LARGER, NOT_LARGER)]
    return replace(plan, lint=(*others, note(code, words)))


def _runs(plan: WrapPlan) -> Iterator[Run]:
    """Yield the runs of two or more units that may be merged."""
    passed: dict[int, list[int]] = {}
    for place, event in enumerate(plan.memory_events):
        if event.event in ("pre_forward", "post_forward"):
            passed.setdefault(event.unit, []).append(place)
    run: Run = []
    end = 0
    for unit in plan.units:
        places = passed.get(unit.order, [])
        # It runs once, and no other unit begins or ends meanwhile.
        alone = len(places) == 2 and places[1] == places[0] + 1
        joins = alone and _may_be_merged(unit)
        follows = joins and run and places[0] == end + 1 and unit.compute_dtype == run[0].compute_dtype
        if run and not follows:
            if len(run) > 1:
                yield run
            run = []
        if joins:
            run.append(unit)
            end = places[1]
    if len(run) > 1:
        yield run


def _may_be_merged(unit: Unit) -> bool:
    """Return True for a sharded frozen unit that is gathered once in a step: backward does not need it."""
    is_frozen = unit.frozen_policy is not None and unit.sharded and not unit.is_root
    return is_frozen and not unit.needed_in_backward and (unit.gathers_forward, unit.gathers_backward) == (1, 0)


def _chunks(runs: Sequence[Run], limit: int) -> list[Run]:
    """Return the parts of runs that together have at most so many bytes, of two units or more."""
    chunks: list[Run] = []
    for run in runs:
        chunk: Run = []
        for unit in run:
            if _bytes_of([*chunk, unit]) > limit:
                chunks.append(chunk)
                chunk = []
            chunk.append(unit)
        chunks.append(chunk)
    return [chunk for chunk in chunks if len(chunk) > 1]


def _bytes_of(chunk: Run) -> int:
    """Return the bytes of units once gathered."""
    return sum(unit.unsharded_bytes for unit in chunk)


def _merged(plan: WrapPlan, chunks: Sequence[Run]) -> WrapPlan:
    """Return the plan with each chunk as one unit, and the events that one micro-step then has."""
    into: dict[int, int] = {}  # the order of a unit -> that of the first of its chunk
    last: dict[int, int] = {}  # the order of the first of a chunk -> that of its last
    units = {unit.order: unit for unit in plan.units}
    for chunk in chunks:
        first = chunk[0].order
        into.update((unit.order, first) for unit in chunk)
        last[first] = chunk[-1].order
        units[first] = _one_of(chunk, plan)
        for unit in chunk[1:]:
            del units[unit.order]
    orders = {before: now for now, before in enumerate(units)}
    by_end = sorted(units.values(), key=lambda unit: unit.forward_end)
    ends = {unit.order: place for place, unit in enumerate(by_end)}
    renumbered = [replace(u, order=orders[u.order], forward_end=ends[u.order]) for u in units.values()]
    events = _events(plan.memory_events, into, last)
    events = [event._replace(unit=orders[event.unit]) for event in events]
    return with_gathers(replace(plan, units=tuple(renumbered), memory_events=tuple(events)))


def _one_of(chunk: Run, plan: WrapPlan) -> Unit:
    """Return the unit of all modules of a chunk."""
    modules = tuple(name for unit in chunk for name in unit.modules)
    params = tuple(p for unit in chunk for p in unit.params)
    end = chunk[-1].forward_end
    unit = replace(chunk[0], name=unit_name(modules), modules=modules, params=params, forward_end=end)
    return with_bytes(unit, plan.fsdp, plan.shard)


def _events(events: Sequence[MemoryEvent], into: dict[int, int], last: dict[int, int]) -> list[MemoryEvent]:
    """Return the events without those between the units of a chunk; their peaks are in the event that follows."""
    kept: list[MemoryEvent] = []
    peak = peak_without_grads = 0
    for event in events:
        first = into.get(event.unit, event.unit)
        peak, peak_without_grads = max(peak, event.peak), max(peak_without_grads, event.peak_without_grads)
        # A unit ends forward with its last module. All else is noted once, with its first.
        speaks = last.get(first, first) if event.event == "post_forward" else first
        if event.unit == speaks:
            kept.append(event._replace(unit=first, peak=peak, peak_without_grads=peak_without_grads))
            peak = peak_without_grads = 0
    return kept
