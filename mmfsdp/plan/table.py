"""A plan as a table of at most 120 columns."""

from __future__ import annotations

import re
import textwrap

from .cost import reductions
from .units import Unit, WrapPlan

NAME = 38
COLUMNS = (
    f"{'unit':<{NAME}} {'kind':<9} {'policy':<10} {'params':>6} {'dtype':>9} {'held':>8} {'gathered':>8} "
    f"{'reduced':>8} {'gathers':<7} {'sent':>8}"
)
FOLD = 24
"""Plans of more units than this show units that are alike in one line."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plan_table(plan: WrapPlan) -> str:
    """One line per unit in the order in which they run, and totals."""
    fsdp, axes = plan.fsdp, f"{plan.shard}" if plan.replicate == 1 else f"{plan.replicate} x {plan.shard}"
    units = tuple(u for u in plan.units if u.params)
    lines = [
        f"{plan.backend} on {plan.world_size} ranks ({axes}), {fsdp.sharding_strategy}, {fsdp.auto_wrap_policy}: "
        f"{len(units)} units",
        COLUMNS,
        "-" * len(COLUMNS),
    ]
    lines += [_line(plan, alike) for alike in _alike(units)]
    lines += ["-" * len(COLUMNS), *_total(plan)]
    for text in ([plan.why] if plan.why else []) + [f"{f.level}: {f.message}" for f in plan.lint]:
        lines += textwrap.wrap(text, len(COLUMNS), subsequent_indent="  ")
    return "\n".join(lines)


def _alike(units: tuple[Unit, ...]) -> list[list[Unit]]:
    """Units of which only the numbers in their names differ, together."""
    if len(units) <= FOLD:
        return [[unit] for unit in units]
    found: dict[tuple, list[Unit]] = {}
    for u in units:
        look = (re.sub(r"\d+", "*", u.name), u.kind, u.grad_flow, u.gathers_backward, u.held_bytes, u.gathered_bytes)
        found.setdefault(look, []).append(u)
    return list(found.values())


def _line(plan: WrapPlan, units: list[Unit]) -> str:
    unit, many = units[0], len(units) > 1
    times = f"{len(units)} x " if many else ""
    name = times + _cut(re.sub(r"[0-9]+", "*", unit.name) if many else unit.name, NAME - len(times))
    policy = unit.frozen_policy.value if unit.frozen_policy else "-"
    flow = "*" if unit.frozen_policy and unit.grad_flow else ""
    kinds = {_SHORT.get(p.dtype, p.dtype) for p in unit.params}
    rest = "mix" if len(kinds) > 1 else min(kinds)
    gathered = size(unit.gathered_bytes) if unit.gathers_forward else "-"
    reduced = size(unit.reduced_bytes) if unit.reduced_bytes else "-"
    ahead = [u.ahead_backward for u in plan.units]
    gathers = f"{unit.gathers_forward}+{unit.gathers_backward}" + "^" * any(u.name in ahead for u in units)
    return (
        f"{name:<{NAME}} {unit.kind:<9} {policy + flow:<10} {count(unit.numel):>6} "
        f"{f'{rest}>{_SHORT.get(unit.compute_dtype, unit.compute_dtype) or rest}':>9} {size(unit.held_bytes):>8} "
        f"{gathered:>8} {reduced:>8} {gathers:<7} {size(sent(plan, unit)):>8}"
    )


_SHOWN = ("kind", "frozen_policy", "grad_flow", "gathers_forward", "gathers_backward", "held_bytes", "gathered_bytes")


def plan_diff(a: WrapPlan, b: WrapPlan) -> str:
    """One line for each choice and unit that differs, alike ones together: `name: what it was -> what it is`."""
    lines = [
        f"{f}: {x} -> {y}"
        for f in a.fsdp.__dataclass_fields__
        if (x := getattr(a.fsdp, f)) != (y := getattr(b.fsdp, f))
    ]
    if a.world_size != b.world_size:
        lines.append(f"world_size: {a.world_size} -> {b.world_size}")
    before, after = ({u.name: u for u in plan.units if u.params} for plan in (a, b))
    changes: dict[tuple[str, str], int] = {}
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if old and new:
            pairs = [(field, getattr(old, field), getattr(new, field)) for field in _SHOWN]
            pairs = [(f, size(x), size(y)) if f.endswith("bytes") else (f, x, y) for f, x, y in pairs if x != y]
            words = ", ".join(f"{field.replace('_bytes', '')} {x} -> {y}" for field, x, y in pairs)
        else:
            words = f"now a unit of its own ({new.kind})" if new else "no unit of its own any more"
        if words:
            look = re.sub(r"\d+", "*", name), words
            changes[look] = changes.get(look, 0) + 1
    lines += [f"{f'{n} x ' if n > 1 else ''}{name}: {words}" for (name, words), n in changes.items()]
    for what, of in (
        ("held", lambda p: sum(u.held_bytes for u in p.units)),
        ("sent", lambda p: sum(sent(p, u) for u in p.units)),
    ):
        if of(a) != of(b):
            lines.append(f"{what} by each rank: {size(of(a))} -> {size(of(b))}")
    return "\n".join(lines)


def changed_units(a: WrapPlan, b: WrapPlan) -> set[str]:
    """Names of the units that one plan has and the other has not, or not so."""
    looks = [{u.name: [getattr(u, field) for field in _SHOWN] for u in plan.units if u.params} for plan in (a, b)]
    return {name for name in looks[0] | looks[1] if looks[0].get(name) != looks[1].get(name)}


def sent(plan: WrapPlan, unit: Unit, micro_steps: int = 1) -> int:
    """Bytes that a rank sends for one unit in a step of so many micro-steps; one that is held is gathered once."""
    times = 1 if unit.hold else micro_steps
    gathers = (unit.gathers_forward + unit.gathers_backward) * unit.gathered_bytes * times
    if not unit.sharded:
        return 2 * unit.reduced_bytes * (plan.world_size - 1) // plan.world_size
    reduced = unit.reduced_bytes * reductions(unit, micro_steps)
    across = 2 * (reduced // plan.shard) * (plan.replicate - 1) // plan.replicate
    return (gathers + reduced) * (plan.shard - 1) // plan.shard + across


def _total(plan: WrapPlan) -> list[str]:
    numel = sum(u.numel for u in plan.units)
    trainable = sum(u.trainable_numel for u in plan.units)
    held = sum(u.held_bytes for u in plan.units)
    wire = sum(sent(plan, u) for u in plan.units)
    also = "; in forward the next one, from its start what stays" if plan.fsdp.forward_prefetch else ""
    legend = (
        f"{count(trainable)} of {count(numel)} parameters train. *: backward passes through (grad flow). dtype: at "
        "rest > in compute. held, gathered, reduced: bytes of a rank at rest, of the unit while it runs, and of its "
        "gradients. gathers: in forward + backward; ^: in backward ahead of need, while the unit after it "
        f"runs{also}. sent: bytes a rank sends in a step of one micro-step."
    )
    total = f"{'total':<{NAME}} {'':<20} {count(numel):>6} {'':>9} {size(held):>8} {'':>25} {size(wire):>8}"
    return [total, *textwrap.wrap(legend, len(COLUMNS))]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-(width - 3) :]


def count(n: float) -> str:
    """A number of things in at most 6 characters: 512, 1.23K, 45.6M."""
    for unit in ("", "K", "M", "B"):
        if n < 999.5 or unit == "B":
            return f"{n:.0f}{unit}" if n >= 100 or n == int(n) else f"{n:.3g}{unit}"
        n /= 1000
    raise AssertionError


def size(n: float) -> str:
    """Bytes for people, in powers of 1024: 512 B, 1.2 KiB, 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1023.5 or unit == "GiB":
            return f"{n:.0f} {unit}" if n >= 100 or n == int(n) else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
