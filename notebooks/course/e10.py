"""Checks of 10_scale_and_speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checks import exercise
from .e05 import MODELS, Answer, as_large, number_of

Spans = list[tuple[float, float]]
CASES: list[tuple[Spans, Spans, float, str]] = [
    ([], [(0, 2), (3, 4)], 3, "With no compute at all, everything is exposed"),
    ([(0, 10)], [(2, 4), (6, 7)], 0, "Communication during a long computation is hidden"),
    ([(0, 10)], [(8, 14)], 4, "An all-gather that outlasts the computation which it overlaps is exposed from there on"),
    ([(0, 2), (4, 6)], [(1, 5)], 2, "An all-gather may overlap two computations, and the gap between them"),
    ([(2, 3), (4, 5)], [(0, 6)], 4, "An all-gather may begin before a computation and end after it"),
]


@exercise("10.exposed")
def exposed(function: Callable[[Spans, Spans], Any]) -> str | None:
    """Right on each of the cases."""
    if not callable(function):
        return "A function `exposed(compute, communication)` is wanted."
    for compute, talk, want, words in CASES:
        try:
            found = function(list(compute), list(talk))
        except Exception as error:
            return f"exposed({compute}, {talk}) raises {type(error).__name__}: {error}"
        if found is None:
            return "It returns nothing yet: a number of seconds is wanted."
        if abs(found - want) > 1e-9:
            spent = sum(b - a for a, b in talk)
            also = " That is all the communication." if abs(found - spent) < 1e-9 else ""
            return f"exposed({compute}, {talk}) gives {found:g}, not {want:g}.{also} {words}."
    return None


@exercise("10.lanes")
def lanes(function: Answer) -> str | None:
    """The events of a small trace, sorted."""
    if not callable(function):
        return "A function is wanted here, not what it returns."
    names = {"aten::mm": (0.0, 10.0), "gloo:all_gather": (5.0, 20.0), "fsdp::split_with_sizes_copy": (30.0, 1.0)}
    found = function([{"name": name, "ts": ts, "dur": dur} for name, (ts, dur) in names.items()])
    if found is None:
        return "It returns nothing yet."
    if len(found) != 2:
        return "Two lists are wanted: compute, communication."
    compute, communication = [[tuple(map(float, span)) for span in spans] for spans in found]
    if (len(compute), len(communication)) == (1, 2):
        return "The order is compute, then communication; and `fsdp::` operators compute: they copy."
    if (len(compute), len(communication)) != (2, 1):
        return (
            f"Of two events that compute and one that communicates, it finds {len(compute)} and {len(communication)}."
        )
    start, end = communication[0]
    if as_large(end, 20e-6):
        return "`dur` is the duration: the end is `ts` + `dur`."
    if as_large(end, 25):
        return "Those are microseconds: divide by 1e6."
    if as_large(start, 5e-6) and as_large(end, 25e-6) and as_large(compute[1][1], 31e-6):
        return None
    return f"The all-gather runs from 5 to 25 microseconds, and you say from {start:g} to {end:g} s."


@exercise("10.tokens")
def tokens(hidden_from: Answer) -> str | None:
    """Bytes over rate, times operations in a second, over operations of a token."""
    from mmfsdp.predict import machine_of

    gpu = machine_of("h100-infiniband")
    for model in MODELS:
        for policy, of_each in {"SHARD": (2, 4), "KEEP": (2, 2), "REPLICATE": (0, 0)}.items():
            found = number_of(hidden_from, *model, policy, gpu, 1e11)
            if isinstance(found, str):
                return found
            sent = of_each[0] * model.F_e + of_each[1] * model.F_b + 8 * model.T
            needed = 2 * (model.F_e + 2 * model.F_b + 3 * model.T)
            right = sent / 1e11 * gpu.flops * gpu.efficiency / needed
            near = {
                right / gpu.efficiency: "That is at the peak. A step reaches the share `gpu.efficiency` of it.",
                sent / 1e11 * gpu.flops * gpu.efficiency / (6 * sum(model)): "That counts 6 operations for each "
                "parameter, as if all of them trained.",
                1 / right: "That is the other way round: tokens = seconds of the network over seconds of a token.",
            }
            if as_large(found, right):
                continue
            for slip, hint in near.items():
                if as_large(found, slip):
                    return hint
            return (
                f"{policy}: {found:,.0f} tokens, and it should be {right:,.0f}. The network takes {sent / 1e11:.3f} s "
                f"for {model}, and a token {1e6 * needed / (gpu.flops * gpu.efficiency):.1f} microseconds."
            )
    return None


@exercise("10.share")
def share(shared_by: Answer) -> str | None:
    """GPUs over sequences, rounded up, at least 1."""
    for gpus, step, sequence in ((16384, 2**24, 8192), (16384, 2**24, 131072), (64, 2**22, 2048), (12, 40960, 8192)):
        found = number_of(shared_by, gpus, step, sequence)
        if isinstance(found, str):
            return found
        sequences = step // sequence
        right = max(1, -(-gpus // sequences))
        what = f"{gpus:,} GPUs, {sequences:,} sequences in a step: "
        if found == right:
            continue
        if found == max(1, gpus // sequences):
            return f"{what}{found:g} is too few, some GPUs would have none. Round up."
        if as_large(found, gpus / sequences):
            return f"{what}a whole number is wanted, and at least 1, not {found:g}."
        return f"{what}{right} GPUs share each, and you say {found:g}."
    return None
