"""A plan and its cost as HTML: alone, or beside another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape

from ..core.plan import WrapPlan, count, size
from ..estimate import Estimate, step_time
from ..estimate.plan_diff import changed_units, plan_diff
from ..estimate.seconds import MACHINES, seconds
from ..params import RunParams
from .markup import key_figures, note, rect, svg, text, width_of
from .plan_picture import WIDTH, plan_picture
from .report import findings, unit_table
from .style import ACTIVATIONS, BUFFERS, FROZEN, GATHERED, INK, OPTIMIZER, REDUCED, TRAINABLE

LAPTOP = "laptop"
"""The machine without GPUs, for which no seconds are predicted."""
PAGE_MACHINES = (LAPTOP, *MACHINES)
"""Machines that the page can show."""
MEMORY_GIB = {"h100": 80, "a100": 80, "rtx4090": 24, LAPTOP: 16}
"""By the beginning of a machine's name. The ranks of a laptop share its memory."""
MEMORY_KINDS = {
    "gathered": "unsharded",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "buffers": "buffers",
    "module_buffers": "model's buffers",
}
"""Fields of an estimate's memory, and their names in the picture."""
MEMORY_COLORS = {
    "frozen weights": FROZEN,
    "trainable weights": TRAINABLE,
    "unsharded": GATHERED,
    "gradients": REDUCED,
    "optimizer": OPTIMIZER,
    "activations": ACTIVATIONS,
    "buffers": INK,
    "model's buffers": BUFFERS,
}
COLUMN_WIDTH = 480
"""Pixels of each picture of two plans side by side."""


@dataclass(frozen=True)
class PlannedRun:
    """Parameters, their plan and its cost."""

    params: RunParams
    plan: WrapPlan
    cost: Estimate

    @property
    def complete(self) -> bool:
        """True with activations; a plan with errors does not run, and has none."""
        return self.cost.peak is not None or any(finding.level == "error" for finding in self.plan.lint)


def plan_page(planned: PlannedRun, *, machine: str) -> str:
    """Return one plan: figures, findings, memory, picture and units. machine: one of PAGE_MACHINES."""
    return _head(planned, machine) + plan_picture(planned.plan) + _units(planned)


def side_by_side(pinned: PlannedRun, current: PlannedRun, *, machine: str) -> str:
    """Return two plans with their differences marked and listed."""
    if not (pinned.cost.peak and current.cost.peak):  # compare both without activations
        pinned = replace(pinned, cost=replace(pinned.cost, peak=None))
        current = replace(current, cost=replace(current.cost, peak=None))
    marked = changed_units(pinned.plan, current.plan)
    longest_bar = max(_memory_bytes(pinned), _memory_bytes(current))
    html = ""
    for title, planned in (("Pinned", pinned), ("Now", current)):
        fsdp, plan = planned.params.fsdp, planned.plan
        name = f"{plan.backend}, {fsdp.sharding_strategy}, frozen {fsdp.frozen_policy}, {plan.world_size} ranks"
        head = _head(planned, machine, full_width_bytes=longest_bar, width=COLUMN_WIDTH)
        picture = plan_picture(plan, marked=marked, width=COLUMN_WIDTH)
        html += f'<section class="mm-column"><h4 class="mm-title">{title}: {escape(name)}</h4>'
        html += f"{head}{picture}{_units(planned)}</section>"
    html = f'<div class="mm-columns">{html}</div>'
    if marked:
        html += note("A dashed line marks each unit that differs.")
    items = ""
    for line in plan_diff(pinned.plan, current.plan).splitlines():
        name, _, change = escape(line.replace(" -> ", " → ")).partition(": ")
        items += f"<li><b>{name}</b>: {change}</li>"
    changes = f"<p>Differences:</p><ul>{items}</ul>" if items else "<p>The two plans are the same.</p>"
    return f'{html}<div class="mm-changes">{changes}</div>'


def _head(planned: PlannedRun, machine: str, *, full_width_bytes: float | None = None, width: float = WIDTH) -> str:
    """Return the figures to compare choices by, the findings, and the memory of a rank."""
    plan, cost, train = planned.plan, planned.cost, planned.params.train
    trainable, numel = sum(unit.trainable_numel for unit in plan.units), sum(unit.numel for unit in plan.units)
    figures = [
        (size(_memory_bytes(planned)), "peak memory of a rank" if cost.peak else "of a rank, without activations"),
        (size(cost.wire_bytes), "each rank sends a step"),
        (count(trainable), f"of {count(numel)} parameters train"),
    ]
    if machine != LAPTOP:
        tokens = None if plan.flops else train.batch_size * planned.params.data.max_length
        times = step_time(plan, train, machine=machine, tokens=tokens)
        figures.append((seconds(times.overlapped), f"expected a step, bound by {times.bound}"))
    memory = cost.peak or cost.memory
    frozen_bytes = sum(unit.bytes_at_rest for unit in plan.units if unit.kind == "frozen")
    parts = {"frozen weights": frozen_bytes, "trainable weights": memory.parameters - frozen_bytes}
    for field, name in MEMORY_KINDS.items():
        parts[name] = getattr(memory, field, 0)
    capacity = next(gib for name, gib in MEMORY_GIB.items() if machine.startswith(name)) * 2**30
    bar = memory_bar(
        parts,
        capacity=capacity // plan.world_size if machine == LAPTOP else capacity,
        device="its share of a laptop" if machine == LAPTOP else machine,
        label="Memory of each rank at its peak" if cost.peak else "Memory of each rank, without activations",
        full_width_bytes=full_width_bytes,
        width=width,
    )
    peak = note(f"Peak in {cost.peak_when}.") if cost.peak else ""
    return key_figures(figures) + findings(plan) + bar + peak


def _memory_bytes(planned: PlannedRun) -> int:
    return planned.cost.peak_bytes or planned.cost.memory_bytes


def _units(planned: PlannedRun) -> str:
    return f"<details><summary>every unit</summary>{unit_table(planned.plan)}</details>"


def memory_bar(
    parts: Mapping[str, int],
    *,
    capacity: float,
    device: str,
    label: str,
    full_width_bytes: float | None = None,
    width: float = WIDTH,
) -> str:
    """Return bytes by kind, one after the other, over a gauge of the capacity that they fill.

    parts: bytes by a name of MEMORY_COLORS. capacity: bytes of the device. full_width_bytes: bytes of a bar as wide as
    the picture, so that two pictures can be compared; default all of them.
    """
    total = sum(parts.values())
    pixels_per_byte = width / max(full_width_bytes or total, 1)
    share = total / max(capacity, 1)
    if share > 1:
        sentence = f"{size(total)} DO NOT FIT into {size(capacity)} ({device})"
    else:
        percent = "less than 1%" if share < 0.01 else f"{share:.0%}"
        sentence = f"{size(total)} of {size(capacity)} ({device}), {percent}"
    elements = [text(0, 13, label, size=13), text(0, 30, sentence, size=13)]

    x, legend_x, legend_y = 0.0, 0.0, 81
    for name, color in MEMORY_COLORS.items():
        if not parts.get(name):
            continue
        words, length = f"{name} {size(parts[name])}", parts[name] * pixels_per_byte
        elements.append(rect(x, 37, length, 24, color, title=words))
        x += length
        if legend_x + width_of(words, 12) + 20 > width:
            legend_x, legend_y = 0.0, legend_y + 18
        elements += [rect(legend_x, legend_y, 12, 12, color), text(legend_x + 17, legend_y + 10, words, size=12)]
        legend_x += width_of(words, 12) + 46
    elements.append(rect(0, 63, width * min(1, share), 8, TRAINABLE if share > 1 else "currentColor"))
    elements.append(rect(0.5, 63, width - 1, 8, "none", outline='stroke="currentColor"'))
    return svg(width, legend_y + 22, f"{label}: {sentence}", *elements)
