"""A plan's findings, and every unit of it, as HTML."""

from __future__ import annotations

from ...core.plan import WrapPlan
from ...params.in_words import count, size
from .markup import note, table


def findings(plan: WrapPlan) -> str:
    """Return what the lint found, and what AUTO chose."""
    html = "".join(note(f"{finding.level}: {finding.message}", finding.level) for finding in plan.lint)
    return html + (note(plan.why) if plan.why else "")


def unit_table(plan: WrapPlan) -> str:
    """Return every unit with its parameters, bytes and traffic."""
    head = ["unit", "kind", "policy", "parameters", "at rest", "unsharded", "all-gathers", "reduced"]
    rows: list[list[object]] = []
    for unit in plan.units:
        nbytes = (unit.bytes_at_rest, unit.unsharded_bytes, unit.reduced_bytes)
        at_rest, unsharded, reduced = [size(value) if value else "–" for value in nbytes]
        gathers = f"{unit.gathers_forward} + {unit.gathers_backward}"
        policy = unit.frozen_policy or ""
        rows.append([unit.name, unit.kind, policy, count(unit.numel), at_rest, unsharded, gathers, reduced])
    about = "at rest: per rank. all-gathers: in forward + backward. reduced: gradients summed over ranks."
    return table(head, rows) + note(about)
