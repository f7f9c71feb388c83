"""Checks of 10_scale_and_speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checks import exercise, number, power_of_two

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


@exercise("10.gain")
def gain(percent: float) -> str | None:
    """30 of 330."""
    near = {
        100 * 200 / 330: "Most of the 200 ms overlap with compute: without those the step would be no shorter.",
        100 * 30 / 200: "Of the communication, yes; of the *step* it is less.",
        100 * 170 / 330: "The 170 ms are those that are hidden already.",
        10.0: "30 of 330, not of 300: the step it is now.",
        30 / 330: "In percent.",
    }
    return number(percent, 100 * 30 / 330, near, "what is exposed, over the whole step.", tolerance=0.015)


@exercise("10.tokens")
def tokens(count: int) -> str | None:
    """The smallest power of two that is not bound by the network."""
    from mmfsdp.predict import on_mesh, step_time

    from .lessons import planned

    most = power_of_two(count)
    if most is None:
        return "A power of two, as a whole number."
    plan = on_mesh(planned("openflamingo_9b", 8, frozen_policy="SHARD"), 1, 1024)

    def bound(some: int) -> tuple[str, str]:
        found = step_time(plan, machine="h100-infiniband", tokens=some)
        figures = f"compute {1e3 * found.compute:.0f} ms, network {1e3 * found.network:.0f} ms"
        return found.bound, figures

    limit, figures = bound(most)
    if limit == "network":
        return f"With {most:,} tokens the step is still bound by the network: {figures}."
    if bound(most // 2)[0] != "network":
        return f"Half as many are enough: {most // 2:,} tokens, {bound(most // 2)[1]}."
    return None


@exercise("10.cache")
def cache(gigabytes: float) -> str | None:
    """524."""
    right = 1e6 * 256 * 1024 * 2 / 1e9
    near = {
        right * 2: "bf16 has 2 bytes, not 4.",
        right / 2: "bf16 has 2 bytes, not 1.",
        right / 256: "Each picture has 256 tokens.",
        right * 1e9 / 2**30: "Those are GiB; GB are 10⁹ bytes.",
        right * 1e9: "In GB, please.",
    }
    return number(gigabytes, right, near, "pictures x tokens x width x bytes of a number.")
