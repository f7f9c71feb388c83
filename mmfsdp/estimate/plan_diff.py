"""Compare two plans: choices, units and totals that differ, as text."""

from __future__ import annotations

import re

from ..core.plan import WrapPlan, size

COMPARED = "kind frozen_policy grad_flow gathers_forward gathers_backward bytes_at_rest unsharded_bytes".split()


def plan_diff(before: WrapPlan, after: WrapPlan) -> str:
    """Return one line for each choice and unit that differs, alike ones together: `name: old -> new`."""
    lines = []
    old_choices = before.fsdp.to_dict() | {"world_size": before.world_size}
    new_choices = after.fsdp.to_dict() | {"world_size": after.world_size}
    for name, old in old_choices.items():
        if new_choices[name] != old:
            lines.append(f"{name}: {old} -> {new_choices[name]}")
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
        old, new = old_units.get(name), new_units.get(name)
        if new is None:
            changes[name] = "no unit of its own any more"
        elif old is None:
            changes[name] = f"now a unit of its own ({new.kind})"
        else:
            differences = []
            for field in COMPARED:
                value, new_value = getattr(old, field), getattr(new, field)
                if value != new_value and "bytes" in field:
                    value, new_value = size(value), size(new_value)
                if value != new_value:
                    differences.append(f"{field.replace('_', ' ')} {value} -> {new_value}")
            if differences:
                changes[name] = ", ".join(differences)
    return changes
