"""A plan as a table of at most 120 columns."""

from __future__ import annotations

from .units import Unit, WrapPlan

COLUMNS = (
    f"{'unit':<44} {'kind':<9} {'policy':<9} {'params':>8} {'at rest':>8} {'compute':>8} {'held':>9} {'gathers':>7}"
)
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plan_table(plan: WrapPlan) -> str:
    """One line per unit in the order in which they run, and totals. Repeated units are folded into one line."""
    fsdp, axes = plan.fsdp, f"{plan.shard}" if plan.replicate == 1 else f"{plan.replicate} x {plan.shard}"
    lines = [
        f"{plan.backend} on {plan.world_size} ranks ({axes}), {fsdp.sharding_strategy}, {fsdp.auto_wrap_policy}: "
        f"{len(plan.units)} units",
        COLUMNS,
        "-" * len(COLUMNS),
    ]
    lines += [_line(unit) for unit in plan.units]
    lines += ["-" * len(COLUMNS), _total(plan)]
    lines += [f"{f.level}: {f.message}" for f in plan.lint]
    return "\n".join(lines)


def _line(unit: Unit) -> str:
    policy = unit.frozen_policy.value if unit.frozen_policy else ("" if unit.kind == "empty" else "train")
    if unit.frozen_policy and unit.grad_flow:
        policy += "*"
    rest = "/".join(sorted({_SHORT.get(p.dtype, p.dtype) for p in unit.params}))
    compute = _SHORT.get(unit.compute_dtype, unit.compute_dtype) or rest
    gathers = f"{unit.gathers_forward}+{unit.gathers_backward}"
    return (
        f"{_cut(unit.name, 44):<44} {unit.kind:<9} {policy:<9} {count(unit.numel):>8} {rest:>8} {compute:>8} "
        f"{size(unit.held_bytes):>9} {gathers:>7}"
    )


def _total(plan: WrapPlan) -> str:
    numel = sum(u.numel for u in plan.units)
    trainable = sum(u.trainable_numel for u in plan.units)
    held = sum(u.held_bytes for u in plan.units)
    return (
        f"{'total':<44} {'':<9} {'':<9} {count(numel):>8} {'':>8} {'':>8} {size(held):>9}\n"
        f"{count(trainable)} of {count(numel)} parameters train. held: bytes per rank at rest. gathers: all-gathers "
        "a micro-step,\nforward + backward. *: backward passes through (grad flow)."
    )


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
