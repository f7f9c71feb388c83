"""Checks of 05_memory_and_traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .checks import exercise, is_number
from .file_parts import own_file
from .grades import unwritten

GIB = 2**30
Answer = Callable[..., Any]


class Parameters(NamedTuple):
    """A model as the lesson counts it: frozen without grad flow, frozen with it, trainable."""

    F_e: float
    F_b: float
    T: float


MODELS = (Parameters(0.3e9, 6.6e9, 1.2e9), Parameters(2e9, 7e9, 0.02e9), Parameters(0, 0, 3e9))


def as_large(value: float, right: float) -> bool:
    """Return True for numbers that differ by less than 1 %."""
    return abs(value - right) <= 0.01 * abs(right)


def number_of(function: Answer, *given: Any) -> float | str:
    """Return what a function returns, or the hint that says why that is no number."""
    if not callable(function):
        return "A function is wanted here, not what it returns."
    value = function(*given)
    if value is None:
        return "It returns nothing yet."
    return float(value) if is_number(value) else f"A number is wanted here, not {type(value).__name__}."


@exercise("05.fits")
def fits(holds: Answer) -> str | None:
    """2 bytes of a frozen parameter, 16 of a trainable one; sharded, but for what is replicated."""
    for model in MODELS:
        frozen = model.F_e + model.F_b
        for ranks in (16, 64):
            for policy in ("SHARD", "KEEP", "REPLICATE"):
                found = number_of(holds, frozen, model.T, ranks, policy)
                if isinstance(found, str):
                    return found
                rest = 2 * frozen if policy == "REPLICATE" else 2 * frozen / ranks
                if not as_large(found, rest + 16 * model.T / ranks):
                    what = f"{frozen / 1e9:g} billion frozen, {model.T / 1e9:g} trainable, {ranks} ranks, {policy}"
                    return f"{what}: {_held(found, frozen, model.T, ranks, policy)}"
    return None


def _held(found: float, frozen: float, trains: float, ranks: int, policy: str) -> str:
    """Return the hint for so many bytes."""
    near = {
        2 * frozen + 16 * trains: "those are the bytes of all ranks together. What is sharded is divided by them.",
        2 * frozen
        + 16 * trains / ranks: "at rest KEEP holds a share, as SHARD does. It keeps from forward to backward.",
        2 * frozen / ranks + 16 * trains / ranks: "a replicated weight is whole on every rank.",
        16 * (frozen + trains) / ranks: "a frozen weight has no gradient and no moments: 2 bytes, in bf16.",
    }
    right = (2 * frozen if policy == "REPLICATE" else 2 * frozen / ranks) + 16 * trains / ranks
    near[right / GIB] = "right in GiB; bytes are wanted."
    near[right - 12 * trains / ranks] = "what trains has a gradient and two moments, too: 16 bytes in all."
    for slip, hint in near.items():
        if as_large(found, slip) and not as_large(slip, right):
            return hint
    return f"{found:,.0f} bytes, and it should be {right:,.0f}."


@exercise("05.bound")
def bound(times: Answer) -> str | None:
    """As `step_time` computes compute, and as `estimate` counts bytes."""
    from mmfsdp.predict import machine_of

    if not callable(times):
        return "A function is wanted here, not what it returns."
    for gpu, rate in ((machine_of("h100-nvlink"), 3.6e11), (machine_of("a100-ethernet"), 2e10)):
        for model in MODELS:
            for policy, of_each in {"SHARD": (2, 4), "KEEP": (2, 2), "REPLICATE": (0, 0)}.items():
                found = times(*model, 64, policy, 512, gpu, rate)
                if found is None:
                    return "It returns nothing yet."
                if not isinstance(found, Mapping) or set(found) != {"compute", "network"}:
                    return 'A dict is wanted: {"compute": seconds, "network": seconds}.'
                sent = (of_each[0] * model.F_e + of_each[1] * model.F_b + 8 * model.T) * 63 / 64
                if hint := _compute(found["compute"], model, gpu) or _network(found["network"], sent / rate, policy):
                    return hint
    return None


def operations(model: Parameters, tokens: int = 512) -> float:
    """Return the operations that a model needs for so many tokens."""
    return 2 * tokens * (model.F_e + 2 * model.F_b + 3 * model.T)


def _compute(seconds: float, model: Parameters, gpu: Any) -> str | None:
    """Return the hint for seconds of compute."""
    right = operations(model) / (gpu.flops * gpu.efficiency)
    if as_large(seconds, right):
        return None
    near = {
        right * gpu.efficiency: "Compute: that is at the peak. A step reaches the share `gpu.efficiency` of it.",
        6 * 512 * sum(model) / (gpu.flops * gpu.efficiency): "Compute: that would be right if all trained. Through "
        "frozen weights with grad flow backward takes 2 operations, not 4; and nothing passes through the others.",
        right / 2: "Compute: a product is a multiplication and an addition, which are 2 operations.",
        right / 512: "Compute: each of the 512 tokens takes these operations.",
    }
    for slip, hint in near.items():
        if as_large(seconds, slip):
            return hint
    return (
        f"Compute: {seconds:.3g} s, and it should be {right:.3g}. Operations of a token: 2 for each F_e, 4 for each "
        "F_b, 6 for each T."
    )


def _network(seconds: float, right: float, policy: str) -> str | None:
    """Return the hint for seconds of the network."""
    if as_large(seconds, right):
        return None
    if as_large(seconds, right * 64 / 63):
        return "Network: nearly. A rank keeps its own part: (W-1)/W of the bytes are sent."
    if as_large(seconds, right * 64):
        return "Network: that multiplies by W - 1, and forgets to divide by W."
    return (
        f"Network, {policy}: {seconds:.3g} s, and it should be {right:.3g}. How often is a frozen weight gathered, "
        "with grad flow and without, under this policy? And a trainable one takes 8 bytes."
    )


@exercise("05.mfu")
def mfu(function: Answer) -> str | None:
    """What the model needs over what the GPU could do."""
    from mmfsdp.predict import machine_of

    gpu = machine_of("h100-infiniband")
    for model, seconds in zip(MODELS, (0.1, 0.3, 0.2), strict=True):
        found = number_of(function, *model, 512, seconds, gpu)
        if isinstance(found, str):
            return found
        right = operations(model) / (seconds * gpu.flops)
        near = {
            6 * 512 * sum(model) / (seconds * gpu.flops): "That counts 6 operations for each parameter, as if all of "
            "them trained. The model needs fewer.",
            right / gpu.efficiency: "That is relative to what a step usually reaches. MFU is relative to the peak.",
            100 * right: "A share is wanted, from 0 to 1, not percent.",
            1 / right: "That is the other way round: what was needed, over what was possible.",
        }
        if as_large(found, right):
            continue
        for slip, hint in near.items():
            if as_large(found, slip):
                return hint
        return f"{found:.4g}, and it should be {right:.4g}: operations over seconds times `gpu.flops`."
    return None


@exercise("05.roofline")
def roofline(attainable: Answer) -> str | None:
    """The lower one of the peak, and of memory's bandwidth times operations a byte."""
    from mmfsdp.predict import machine_of

    for gpu in (machine_of("h100-nvlink"), machine_of("rtx4090-pcie")):
        for t, d in ((1, 4096), (64, 1024), (256, 4096), (8192, 8192)):
            found = number_of(attainable, t, d, gpu)
            if isinstance(found, str):
                return found
            by_memory = 2 * t * d**2 / (2 * (2 * t * d + d**2)) * gpu.memory
            right = min(gpu.flops, by_memory)
            if as_large(found, right):
                continue
            if as_large(found, by_memory):
                return f"{t} tokens, width {d}: {found:.3g} FLOP/s is more than the peak of {gpu.flops:.3g}."
            if as_large(found, gpu.flops):
                return f"{t} tokens, width {d}: memory is the limit here. Reading the matrix alone takes longer."
            if as_large(found, 2 * by_memory):
                return "A number in bf16 has 2 bytes."
            return (
                f"{t} tokens, width {d}: {found:.3g} FLOP/s, and it should be {right:.3g}. By memory: operations, over "
                "the seconds that the bytes take."
            )
    return None


@exercise("05.link")
def link(fit: Answer) -> str | None:
    """Lines without noise exactly, and the latency of one with noise in its largest messages."""
    sizes = [4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20, 16 * 2**20]
    for latency, bandwidth, noise in ((1e-4, 1e9, 1.0), (2e-5, 2.5e10, 1.0), (1e-4, 1e9, 1.05)):
        seconds = [latency + size / bandwidth for size in sizes]
        seconds[-1] *= noise
        if not callable(fit):
            return "A function is wanted here, not what it returns."
        found = fit(list(sizes), list(seconds))
        if found is None:
            return "It returns nothing yet."
        mine = tuple(map(float, found))
        if len(mine) != 2:
            return "Two numbers are wanted: latency and bandwidth."
        if noise > 1 and (not 0.5 * latency < mine[0] < 2 * latency or not 0.8 * bandwidth < mine[1] < 1.2 * bandwidth):
            return (
                f"If the largest message takes 5 % longer, your latency is {1e6 * mine[0]:.0f} microseconds instead of "
                "100: weigh each point by 1 / seconds."
            )
        if noise == 1 and not (as_large(mine[0], latency) and as_large(mine[1], bandwidth)):
            if as_large(mine[1], 1 / bandwidth):
                return "The slope is seconds for each byte. Bandwidth is bytes per second: 1 / slope."
            if as_large(mine[0], bandwidth) or as_large(mine[0], 1 / bandwidth):
                return "The order is latency, then bandwidth. `polyfit` returns the slope first."
            what = f"latency {latency:g} s and {bandwidth:g} bytes per second"
            return f"For {what} it returns {mine[0]:.3g} and {mine[1]:.3g}."
    return None


@exercise("05.prefetch")
def prefetch() -> str | None:
    """What the arena counts: the losses of `fully_shard`, no gather more, and gathers behind compute in both phases."""
    from mmfsdp.kit.arena.gate import Refused, try_file

    if hint := unwritten("prefetch"):
        return hint
    try:
        result = try_file(str(own_file()))
    except Refused as refused:
        return refusal(str(refused), {finding.code for finding in refused.findings})
    if "gradient flow" not in result.levels:
        return "Backward gathers units that it does not pass through: start those only that have a hook."
    for phase in ("forward", "backward"):
        hidden, gathers = hidden_gathers(result.mine.events, phase)
        if hidden < gathers / 2:
            return (
                f"Of {gathers} all-gathers in {phase}, {hidden} are on their way while something computes. Begin them "
                "with `async_op=True`, some units ahead, and wait in `gather` only."
            )
    return None


def refusal(words: str, codes: set[str]) -> str:
    """Return the hint for a file that the arena refuses in these words, by findings of these codes."""
    if "has no attribute 'wait'" in words:
        return WITHOUT_HANDLE
    return f"The arena refuses the file: {words}. {NOT_WAITED if codes & {'losses', 'weights'} else ''}".rstrip()


NOT_WAITED = "Is each handle waited for before its pieces are filled, and taken out of `STARTED` then?"
WITHOUT_HANDLE = "A collective returns a handle with `async_op=True` only; without it, it returns None once it is over."


def hidden_gathers(events: list[Any], phase: str) -> tuple[int, int]:
    """Return how many all-gathers of a phase have compute between their beginning and their wait, and how many there
    are. events: what the arena has counted in a step."""
    computed, number = 0, 0
    started: dict[int, int] = {}
    hidden, gathers = 0, 0
    for event in events:
        if event[0] == "compute":
            computed += 1
        elif event[0] == "send":
            if event[1] == "all-gather" and event[3] == phase:
                started[number] = computed
                gathers += 1
            number += 1
        elif event[1] in started:
            hidden += started.pop(event[1]) < computed
    return hidden, gathers
