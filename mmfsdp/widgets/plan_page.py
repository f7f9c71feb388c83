"""A plan and what it costs, as HTML: by itself, or beside another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape

from ..estimate import MACHINES, Estimate, step_time
from ..estimate.times import seconds
from ..params import RunParams
from ..plan import WrapPlan
from ..plan.table import changed_units, count, size
from ..plots import memory_bar, plan_picture
from ..report import findings, unit_table
from ..report.html import cells

MEMORY = {"h100": 80, "a100": 80, "rtx4090": 24, "laptop": 16}
"""GiB by the beginning of a machine's name. A laptop's is shared by all ranks."""
HELD = {
    "parameters": "",
    "gathered": "gathered",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "buffers": "buffers",
    "module_buffers": "model's buffers",
}
"""What an estimate itemizes, and what the picture calls it."""
HALF = 480
"""Pixels of pictures that stand beside each other."""


@dataclass(frozen=True)
class Planned:
    """Choices, their plan and its cost."""

    params: RunParams
    plan: WrapPlan
    cost: Estimate

    @property
    def whole(self) -> bool:
        """There is no more to be known: a plan with errors does not run, and has no peak."""
        return self.cost.peak is not None or any(f.level == "error" for f in self.plan.lint)


def page(planned: Planned, *, machine: str) -> str:
    """One plan, whole. machine: a name of MACHINES."""
    return _head(planned, machine) + plan_picture(planned.plan) + _units(planned)


def side_by_side(a: Planned, b: Planned, *, machine: str) -> str:
    """Two plans, what differs marked and listed."""
    if not (a.cost.peak and b.cost.peak):  # like is compared with like
        a, b = (replace(one, cost=replace(one.cost, peak=None)) for one in (a, b))
    marked = changed_units(a.plan, b.plan)
    full = max(one.cost.peak_bytes or one.cost.memory_bytes for one in (a, b))
    columns = "".join(
        f'<section class="mm-column"><h4 class="mm-title">{title}: {escape(_name(one))}</h4>'
        f"{_head(one, machine, full=full, width=HALF)}{plan_picture(one.plan, marked=marked, width=HALF)}"
        f"{_units(one)}</section>"
        for title, one in (("Pinned", a), ("Now", b))
    )
    lines = [escape(line.replace(" -> ", " → ")).partition(": ") for line in a.plan.diff(b.plan).splitlines()]
    items = "".join(f"<li><b>{name}</b>: {change}</li>" for name, _, change in lines)
    changes = f"<p>What differs:</p><ul>{items}</ul>" if items else "<p>The two plans are the same.</p>"
    legend = '<p class="mm-quiet">A dashed line marks each unit that differs.</p>' if marked else ""
    return f'<div class="mm-columns">{columns}</div>{legend}<div class="mm-changes">{changes}</div>'


def _name(planned: Planned) -> str:
    fsdp, plan = planned.params.fsdp, planned.plan
    return f"{plan.backend}, {fsdp.sharding_strategy}, frozen {fsdp.frozen_policy}, {plan.world_size} ranks"


def _head(planned: Planned, machine: str, **look: float) -> str:
    """The figures that choices are compared by, what the lint says, and the memory of a rank."""
    plan, cost, train = planned.plan, planned.cost, planned.params.train
    tokens = None if plan.calls else train.batch_size * planned.params.data.max_length
    times = step_time(plan, train, machine=machine, tokens=tokens)
    numel, trains = sum(u.numel for u in plan.units), sum(u.trainable_numel for u in plan.units)
    shown = [
        (size(cost.peak_bytes or cost.memory_bytes), "each rank holds at most" if cost.peak else "each rank holds"),
        (size(cost.wire_bytes), "each rank sends a step"),
        (seconds(times.overlapped), f"expected a step, bound by {times.bound}"),
        (count(trains), f"of {count(numel)} parameters train"),
    ]
    return cells(shown) + findings(plan) + _memory(planned, machine, **look)


def _memory(planned: Planned, machine: str, **look: float) -> str:
    """What a rank's memory is filled with when it is fullest, or activations apart where they are not known."""
    plan, cost = planned.plan, planned.cost
    held = {kind: getattr(cost.peak or cost.memory, kind, 0) for kind in HELD}
    frozen = sum(u.held_bytes for u in plan.units if u.kind == "frozen")
    parts = {"frozen weights": frozen, "trainable weights": held.pop("parameters") - frozen}
    parts |= {HELD[kind]: nbytes for kind, nbytes in held.items()}
    capacity, of = next(gib for name, gib in MEMORY.items() if machine.startswith(name)) * 2**30, machine
    if machine == "laptop":
        capacity, of = capacity // plan.world_size, "its share of a laptop"
    label = "Memory of each rank, " + ("when it is fullest" if cost.peak else "activations apart")
    when = f'<p class="mm-quiet">Fullest in {escape(cost.peak_when)}.</p>' if cost.peak else ""
    return memory_bar(parts, capacity=capacity, label=label, of=of, **look) + when


def _units(planned: Planned) -> str:
    return f"<details><summary>every unit</summary>{unit_table(planned.plan)}</details>"


__all__ = ["MACHINES", "Planned", "page", "side_by_side"]
