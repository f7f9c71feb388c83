"""A plan and its cost as HTML, with what differs from a pinned plan."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..core.plan import WrapPlan, count, size
from ..estimate import Estimate, step_time
from ..estimate.seconds import MACHINES
from ..params import RunParams
from .markup import key_figures
from .plan_picture import plan_picture
from .report import findings, unit_table
from .style import ACTIVATIONS, BUFFERS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE

LAPTOP = "laptop"
"""The machine without GPUs, for which no seconds are predicted."""
PAGE_MACHINES = (LAPTOP, *MACHINES)
"""Machines that the page can show."""
MEMORY_GIB = {"h100": 80, "a100": 80, "rtx4090": 24, LAPTOP: 16}
"""By the beginning of a machine's name. The ranks of a laptop share its memory."""
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
    plan, cost, train = planned.plan, planned.cost, planned.params.train
    trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
    about = "peak memory of a rank" if cost.peak else "of a rank, without activations"
    figures = [
        (size(cost.peak_bytes or cost.memory_bytes), about),
        (size(cost.wire_bytes), "each rank sends a step"),
        (count(trainable), f"of {count(numel)} parameters train"),
    ]
    if machine != LAPTOP:
        tokens = None if plan.flops else train.batch_size * planned.params.data.max_length
        times = step_time(plan, train, machine=machine, tokens=tokens)
        figures.append((times.expected, f"expected a step, bound by {times.bound}"))
    return key_figures(figures) + findings(plan)


def _memory(planned: PlannedRun, machine: str) -> str:
    """Return the memory of a rank as a bar with a legend, and whether it fits into the machine's."""
    plan, cost = planned.plan, planned.cost
    memory = cost.peak or cost.memory
    frozen_bytes = sum(unit.bytes_at_rest for unit in plan.units if unit.kind == "frozen")
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

    total, device = sum(nbytes for _, _, nbytes in parts), machine
    capacity = next(gib for name, gib in MEMORY_GIB.items() if machine.startswith(name)) * 2**30
    if machine == LAPTOP:
        capacity, device = capacity // plan.world_size, "its share of a laptop"
    sentence = f"{size(total)} of {size(capacity)} ({device}), {total / capacity:.1%}"
    if total > capacity:
        sentence = f"{size(total)} DO NOT FIT into {size(capacity)} ({device})"
    label = "Memory of each rank, without activations"
    if cost.peak:
        label = f"Memory of each rank at its peak, in {escape(cost.peak_when)}"
    return f'<p>{label}<br>{sentence}</p><div class="mm-bar">{bar}</div><div class="mm-legend">{legend}</div>'
