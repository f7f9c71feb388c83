"""Compare two plans: choices, units and totals that differ, as text."""

from __future__ import annotations

import re

from ..core.plan import Unit, WrapPlan, size

COMPARED = "kind frozen_policy grad_flow gathers_forward gathers_backward bytes_at_rest unsharded_bytes".split()


def plan_diff(before: WrapPlan, after: WrapPlan) -> str:
    """Return one line for each choice and unit that differs, alike ones together: `name: old -> new`."""
    lines = []
    choices_after = after.to_dict()["fsdp"] | {"world_size": after.world_size}
    for name, old in (before.to_dict()["fsdp"] | {"world_size": before.world_size}).items():
        if choices_after[name] != old:
            lines.append(f"{name}: {old} -> {choices_after[name]}")
    counts: dict[str, int] = {}
    for name, change in changed_units(before, after).items():
        line = re.sub(r"\d+", "*", name) + f": {change}"
        counts[line] = counts.get(line, 0) + 1
    lines += [f"{number} x {line}" if number > 1 else line for line, number in counts.items()]
    totals = []
    for plan in (before, after):
        at_rest = sum(unit.bytes_at_rest for unit in plan.units)
        totals.append((at_rest, sum(plan.wire_bytes(unit) for unit in plan.units)))
    for name, old, new in zip(("held", "sent"), *totals, strict=True):
        if old != new:
            lines.append(f"{name} by each rank: {size(old)} -> {size(new)}")
    return "\n".join(lines)


def changed_units(before: WrapPlan, after: WrapPlan) -> dict[str, str]:
    """Return the changes of each unit that differs between two plans, or that only one has, by name."""
    old_units = {unit.name: unit for unit in before.units if unit.params}
    new_units = {unit.name: unit for unit in after.units if unit.params}
    changes = {}
    for name in old_units | new_units:
        change = _unit_change(old_units.get(name), new_units.get(name))
        if change:
            changes[name] = change
    return changes


def _unit_change(old: Unit | None, new: Unit | None) -> str:
    if new is None:
        return "no unit of its own any more"
    if old is None:
        return f"now a unit of its own ({new.kind})"
    changes = []
    for name in COMPARED:
        value, new_value = getattr(old, name), getattr(new, name)
        if value != new_value and "bytes" in name:
            value, new_value = size(value), size(new_value)
        if value != new_value:
            changes.append(f"{name.replace('_', ' ')} {value} -> {new_value}")
    return ", ".join(changes)
