"""A plan of a run as the cockpit shows it: with its cost, and whether it fits into the memory of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import NamedTuple

from ...core.plan import WrapPlan
from ...params import RunParams
from ...params.in_words import size
from ...predict import LAPTOP, LAPTOP_BYTES, MACHINES, Estimate, machine_of_run, step_time, workload
from ...predict.timeline import Timeline
from .pictures.plan_pictures import NO_EXAMPLE, timeline_of

PAGE_MACHINES = (LAPTOP, *MACHINES)
"""Machines that can be chosen."""
COUNTING = "One step on a rank: its activations are being counted."


@dataclass(frozen=True)
class PlannedRun:
    """Parameters, their plan and its cost."""

    params: RunParams
    plan: WrapPlan
    cost: Estimate
    rates: str = ""
    """The learning rates by part in a line."""
    counting: bool = False
    """True while the activations of a step are being counted."""

    @cached_property
    def timeline(self) -> Timeline | None:
        """One step of a rank; None without an example."""
        return timeline_of(self.params, self.plan)

    @property
    def missing(self) -> str:
        """The reason why there is no timeline, in words."""
        return COUNTING if self.counting else NO_EXAMPLE


class Room(NamedTuple):
    """Memory that a rank needs, and what it has."""

    needed: int
    capacity: int
    sentence: str

    @property
    def is_enough(self) -> bool:
        """True if the plan fits."""
        return self.needed <= self.capacity


def room(total: int, planned: PlannedRun, machine: str) -> Room:
    """Return whether so many bytes of tensors fit, with what a GPU needs beyond them. machine: of PAGE_MACHINES."""
    if machine == LAPTOP:
        capacity, beyond, needed = LAPTOP_BYTES // planned.plan.world_size, "", total
        machine = "its share of a laptop"
    else:
        gpu = machine_of_run(machine, planned.params)
        capacity, needed = int(gpu.capacity), gpu.needed_bytes(total)
        beyond = f"; {size(needed)} with what a GPU needs beyond its tensors ({gpu.margin})"
    sentence = f"{size(total)} of {size(capacity)} ({machine}), {total / capacity:.1%}{beyond}"
    if needed > capacity:
        sentence += ": DOES NOT FIT"
    return Room(needed, capacity, sentence)


def room_at_peak(planned: PlannedRun, machine: str) -> Room:
    """Return the room of a plan at its peak, as far as that is known."""
    return room(planned.cost.peak_bytes or planned.cost.memory_bytes, planned, machine)


def fit_html(planned: PlannedRun, machine: str) -> str:
    """Return a bar of the memory that is taken, and the seconds of a step where they are predicted."""
    found = room_at_peak(planned, machine)
    share, words = found.needed / found.capacity, escape(found.sentence)
    bar = f'<div class="mm-fit" role="img" aria-label="{words}"><i style="width:{min(1.0, share):.1%}"></i></div>'
    figures = f"{size(found.needed)} of {size(found.capacity)}"
    if found.is_enough:
        figures += f", {share:.0%}"
    html = f'<div class="mm-fit-row" title="{words}">{bar}<span class="mm-quiet">{figures}</span></div>'
    if not found.is_enough:
        where = f"{machine}, with what a GPU needs beyond tensors"
        if machine == LAPTOP:
            where = "a rank's share of a laptop"
        html += f'<div class="mm-error" role="alert">DOES NOT FIT into {escape(where)}</div>'
    if machine != LAPTOP:
        times = step_time(
            planned.plan, machine=machine_of_run(machine, planned.params), **workload(planned.plan, planned.params)
        )
        html += f'<div class="mm-quiet">a step: {escape(times.expected)}, bound by {escape(times.bound)}</div>'
    return html
