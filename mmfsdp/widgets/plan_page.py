"""A plan and its cost as HTML, with what differs from a pinned plan."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..core.plan import UnitKind, WrapPlan
from ..params import RunParams
from ..params.numbers import count, size
from ..predict import LAPTOP, LAPTOP_BYTES, MACHINES, Estimate, machine_of_run, step_time, workload
from .markup import key_figures
from .plan_picture import plan_picture
from .report import findings, unit_table
from .style import ACTIVATIONS, BUFFERS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE

PAGE_MACHINES = (LAPTOP, *MACHINES)
"""Machines that the page can show."""
MEMORY_KINDS = {
    "gathered": ("unsharded", GATHERED),
    "gradients": ("gradients", REDUCED),
    "optimizer": ("optimizer", OPTIMIZER),
    "activations": ("activations", ACTIVATIONS),
    "buffers": ("buffers", INK),
    "module_buffers": ("model's buffers", BUFFERS),
}
"""Fields of an estimate's memory, with their names and colors on the page."""


@dataclass(frozen=True)
class PlannedRun:
    """Parameters, their plan and its cost."""

    params: RunParams
    plan: WrapPlan
    cost: Estimate
    rates: str = ""
    """The learning rates by part in a line."""


def plan_page(planned: PlannedRun, *, machine: str, pinned: PlannedRun | None = None) -> str:
    """Return a plan: figures, findings, memory, picture and units; below a pinned one's figures and what differs.

    machine: one of PAGE_MACHINES.
    """
    html = ""
    if pinned:
        html = f'<h4 class="mm-title">Pinned</h4>{_figures(pinned, machine)}{_differences(pinned.plan, planned.plan)}'
        html += '<h4 class="mm-title">Now</h4>'
    html += _figures(planned, machine) + _memory(planned, machine) + plan_picture(planned.plan)
    return f"{html}<details><summary>every unit</summary>{unit_table(planned.plan)}</details>"


def _differences(before: WrapPlan, after: WrapPlan) -> str:
    """Return the choices that differ; what follows from them stands in the figures and the units."""
    new_choices = after.fsdp.to_dict() | {"ranks": after.world_size}
    items = ""
    for name, old in (before.fsdp.to_dict() | {"ranks": before.world_size}).items():
        if new_choices[name] != old:
            items += f"<li><b>{name}</b>: {escape(str(old))} → {escape(str(new_choices[name]))}</li>"
    return f'<ul class="mm-changes">{items}</ul>' if items else "<p>The choices are the same.</p>"


def _figures(planned: PlannedRun, machine: str) -> str:
    """Return the figures to compare choices by, and the findings."""
    plan, cost = planned.plan, planned.cost
    trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
    about = "peak memory of a rank" if cost.peak else "of a rank, without activations"
    figures = [
        (size(cost.peak_bytes or cost.memory_bytes), about),
        (size(cost.wire_bytes), "each rank sends a step"),
        (count(trainable), f"of {count(numel)} parameters train"),
    ]
    if machine != LAPTOP:
        times = step_time(plan, machine=machine_of_run(machine, planned.params), **workload(plan, planned.params))
        figures.append((times.expected, f"expected a step, bound by {times.bound}"))
    rates = f"<p>{escape(planned.rates)}</p>" if planned.rates else ""
    return key_figures(figures) + findings(plan) + rates


def _memory(planned: PlannedRun, machine: str) -> str:
    """Return the memory of a rank as a bar with a legend, and whether it fits into the machine's."""
    plan, cost = planned.plan, planned.cost
    memory = cost.peak or cost.memory
    frozen_bytes = sum(unit.bytes_at_rest for unit in plan.units if unit.kind is UnitKind.FROZEN)
    parts = [("frozen weights", FROZEN, frozen_bytes)]
    parts.append(("trainable weights", TRAINABLE, memory.parameters - frozen_bytes))
    for field, (name, color) in MEMORY_KINDS.items():
        parts.append((name, color, getattr(memory, field, 0)))
    bar = legend = ""
    for name, color, nbytes in parts:
        if nbytes:
            words = f"{name} {size(nbytes)}"
            bar += f'<span title="{words}" style="flex: {nbytes}; background: {color}"></span>'
            legend += f'<span><i style="background: {color}"></i>{words}</span>'

    sentence = _room(sum(nbytes for _, _, nbytes in parts), planned, machine)
    label = "Memory of each rank, without activations"
    if cost.peak:
        label = f"Memory of each rank at its peak, in {escape(cost.peak_when)}"
    return f'<p>{label}<br>{sentence}</p><div class="mm-bar">{bar}</div><div class="mm-legend">{legend}</div>'


def _room(total: int, planned: PlannedRun, machine: str) -> str:
    """Return whether so many bytes of tensors fit, with what a GPU needs beyond them."""
    if machine == LAPTOP:
        capacity, beyond, needed = LAPTOP_BYTES // planned.plan.world_size, "", total
        machine = "its share of a laptop"
    else:
        gpu = machine_of_run(machine, planned.params)
        capacity, needed = int(gpu.capacity), gpu.needed_bytes(total)
        beyond = f"; {size(needed)} with what a GPU needs beyond its tensors ({gpu.margin})"
    sentence = f"{size(total)} of {size(capacity)} ({machine}), {total / capacity:.1%}{beyond}"
    return f"{sentence}: DOES NOT FIT" if needed > capacity else sentence
