"""A plan and its cost as HTML, with what differs from a pinned plan."""

from __future__ import annotations

from html import escape

from ...core.plan import WrapPlan
from ...params.in_words import count, size
from ...params.phases import phases_of
from ...predict import LAPTOP, machine_of_run, step_time, workload
from ...predict.timeline import frozen_bytes_at_rest
from .pictures.plan_pictures import plan_pictures
from .plan_figures import figures_html, findings, plan_figures, unit_table
from .planned_run import PlannedRun, room
from .style import FILL

MEMORY_KINDS = {
    "optimizer": ("optimizer", "optimizer"),
    "gathered": ("gathered", "gathered"),
    "gradients": ("gradients", "gradients"),
    "buffers": ("communication buffers", "buffers"),
    "module_buffers": ("model's buffers", "buffers"),
    "activations": ("activations", "activations"),
}
"""Fields of an estimate's memory, with their names on the page and their colors in FILL."""


def plan_page(planned: PlannedRun, *, machine: str, pinned: PlannedRun | None = None) -> str:
    """Return a plan: figures with their change since a pinned one, findings, both pictures, memory and units.

    machine: one of planned_run.PAGE_MACHINES.
    """
    changes = differences_html(pinned.plan, planned.plan) if pinned else ""
    html = _figures(planned, machine, pinned) + changes
    before = pinned.timeline if pinned else None
    html += plan_pictures(planned.plan, planned.timeline, pinned=before, missing=planned.missing)
    html += memory_html(planned, machine)
    return f"{html}<details><summary>every unit</summary>{unit_table(planned.plan)}</details>"


def differences_html(before: WrapPlan, after: WrapPlan) -> str:
    """Return the choices that differ; what follows from them stands in the figures and the units."""
    new_choices = after.fsdp.to_dict() | {"ranks": after.world_size}
    items = ""
    for name, old in (before.fsdp.to_dict() | {"ranks": before.world_size}).items():
        if new_choices[name] != old:
            items += f"<li><b>{name}</b>: {escape(str(old))} → {escape(str(new_choices[name]))}</li>"
    if not items:
        return "<p>The choices are those of the pinned plan.</p>"
    return f'<p>Since the pinned plan:</p><ul class="mm-changes">{items}</ul>'


def _figures(planned: PlannedRun, machine: str, pinned: PlannedRun | None) -> str:
    """Return the figures to compare choices by, and the findings."""
    plan, cost = planned.plan, planned.cost
    trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
    before = (pinned.plan, pinned.cost) if pinned else None
    html = figures_html(plan_figures(plan, cost, pinned=before))
    facts = [f"{count(trainable)} of {count(numel)} parameters train."]
    if machine != LAPTOP:
        times = step_time(plan, machine=machine_of_run(machine, planned.params), **workload(plan, planned.params))
        facts.append(f"Expected: {times.expected} a step, bound by {times.bound}.")
    if cost.batch and cost.batch_peak is None:
        facts.append(f"No peak of a batch of the data: {cost.batch}.")
    if cost.data and cost.data.sizes_differ:
        facts.append(f"Largest batch of the data: {cost.data.largest}; {cost.data.shares}.")
    if planned.rates:
        facts.append(planned.rates)
    if planned.params.train.freeze_from:
        first, *_ = phases_of(planned.params)
        facts.append(f"This is the plan of {first}; `mmfsdp plan`, and the report, show that of each phase.")
    return f"{html}<p>{escape(' '.join(facts))}</p>{findings(plan)}"


def memory_html(planned: PlannedRun, machine: str) -> str:
    """Return the memory of a rank as a bar with a legend, and whether it fits into the machine's."""
    plan, cost = planned.plan, planned.cost
    memory = cost.peak or cost.memory
    frozen = frozen_bytes_at_rest(plan)
    parts = [("frozen weights", FILL["frozen"], frozen)]
    parts.append(("trainable weights", FILL["trainable"], memory.parameters - frozen))
    for field, (name, color) in MEMORY_KINDS.items():
        parts.append((name, FILL[color], getattr(memory, field, 0)))
    bar = legend = ""
    for name, color, nbytes in parts:
        if nbytes:
            words = f"{name} {size(nbytes)}"
            bar += f'<span title="{words}" style="flex: {nbytes}; background: {color}"></span>'
            legend += f'<span><i style="background: {color}"></i>{words}</span>'

    sentence = room(sum(nbytes for _, _, nbytes in parts), planned, machine).sentence
    label = "Memory of each rank, without activations"
    if cost.peak:
        label = f"Memory of each rank at its peak, in {escape(cost.peak_when)}"
    return f'<p>{label}<br>{sentence}</p><div class="mm-bar">{bar}</div><div class="mm-legend">{legend}</div>'
