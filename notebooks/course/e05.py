"""Checks of 05_memory_and_traffic."""

from __future__ import annotations

from collections.abc import Sequence

from .checks import exercise, number, power_of_two


@exercise("05.precision")
def precision(gathers: float, reductions: float) -> str | None:
    """Half the all-gathers, the same reductions."""
    near = {4.0: "fp32 has 4 bytes and bf16 has 2: the ratio is asked for.", 1.0: "bf16 has 2 bytes where fp32 has 4."}
    if gathers == 0.5:  # the same, said the other way round
        gathers = 2
    hint = number(gathers, 2, near, "4 bytes in fp32, 2 in bf16.")
    if hint:
        return f"Gathers: {hint}"
    if reductions in (2, 0.5):
        return "Reductions: only if `reduce_dtype` were bf16, too. Sums over many ranks are kept in fp32."
    return None if reductions == 1 else "Reductions: in which dtype are the gradients summed here?"


@exercise("05.recompute")
def recompute(percent: float) -> str | None:
    """One more forward of 1 in 3."""
    near = {
        100.0: "That would be everything twice. Only forward is computed again.",
        50.0: "One part of forward more, and the whole step had three parts.",
        133.3: "That is the new time; how much *longer* is it?",
        25.0: "Of the new time, yes; relative to the old one it is more.",
        1 / 3: "In percent.",
    }
    formula = "forward again (1 part) over what a step took (1 + 2 parts)."
    return number(percent, 100 / 3, near, formula, tolerance=0.015)


@exercise("05.accumulate")
def accumulate(held: float, naive: float) -> str | None:
    """Once, or four times."""
    if held == 4:
        return "A unit that stays gathered is not gathered again, and gradients are summed before they are sent."
    if held != 1:
        return "Units that stay gathered are all-gathered once for all micro-steps, and gradients are reduced once."
    return None if naive == 4 else "Without that, every micro-step sends as much as a whole step."


@exercise("05.fits")
def fits(ranks: int) -> str | None:
    """The smallest power of two."""
    from mmfsdp import estimate

    from .lessons import planned

    count = power_of_two(ranks)
    if count is None:
        return "A power of two, as a whole number."

    def at_rest(world_size: int) -> float:
        memory = estimate(planned("openflamingo_9b", world_size, frozen_policy="SHARD")).memory
        return (memory.parameters + memory.gradients + memory.optimizer) / 2**30

    if at_rest(count) > 2:
        return f"With {count} ranks each holds {at_rest(count):.2f} GiB at rest: more ranks."
    if count > 1 and at_rest(count // 2) <= 2:
        return f"It fits, but {count // 2} ranks are enough: {at_rest(count // 2):.2f} GiB each."
    return None


@exercise("05.bound")
def bound(machines: Sequence[str]) -> str | None:
    """Those whose bound changes."""
    from mmfsdp.predict import step_time

    from .lessons import SIX_MACHINES, planned

    if isinstance(machines, str):
        return "A list of names, such as ['a100-nvlink']."
    plans = {policy: planned("openflamingo_9b", 64, frozen_policy=policy) for policy in ("SHARD", "REPLICATE")}
    bounds = {m: [step_time(plan, machine=m, tokens=512).bound for plan in plans.values()] for m in SIX_MACHINES}
    want = {m for m, (shard, replicate) in bounds.items() if shard == "network" != replicate}
    for name in machines:
        if name not in bounds:
            return f"{name!r} is not one of {', '.join(bounds)}."
        if name not in want:
            return f"On {name} it is bound by {bounds[name][0]} with SHARD and by {bounds[name][1]} with REPLICATE."
    missing = want - set(machines)
    return f"{len(missing)} more: read the table for 'network' in the SHARD rows." if missing else None
