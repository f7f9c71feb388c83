"""Play the counted step of a rank on a machine with 64 GPUs, as if the arena's model were a large one.

As if: every tensor is so many times larger that the model has PARAMETERS parameters in bf16, and each rank has TOKENS
tokens. Then a collective moves its share of the larger tensor, and a product takes its FLOPs times the ratio of
parameters and of tokens. One stream computes, one sends; a collective begins when it was called and the one before it
has ended, and a wait lasts until it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch

from ...core.plan import ring_bytes
from ...predict.machines import machine_of
from ...predict.seconds import ring_time
from .model import SAMPLES
from .model import TOKENS as TOY_TOKENS
from .step_log import Event

MACHINE, RANKS = "h100-infiniband", 64
PARAMETERS, TOKENS = 40e9, 2048
"""Of the model as it is played, and of a rank's micro-batch. Its weights in bf16 are a little more than a GPU holds."""
NARROWER = 0.5
"""Bytes of bf16 for each of the fp32 in which the arena's model computes."""


def as_fp32(events: list[Event]) -> list[Event]:
    """Return the events with all sends in fp32: of any other dtype a byte counts twice.

    Since fp32 is played as bf16, of half its bytes, other bytes are then played as they are.
    """
    wide = []
    for event in events:
        if event[0] == "send" and event[4] != "float32":
            _, kind, nbytes, phase, _ = event
            event = ["send", kind, 2 * nbytes, phase, "float32"]
        wide.append(event)
    return wide


def times_larger(parameters: float, whole: int) -> float:
    """Return how many times as many parameters these are as those of the arena's model, of `whole` bytes in fp32."""
    return parameters / (whole / torch.float32.itemsize)


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank of the arena's model holds, as in fp32, from measurements on 2 and on 3 ranks."""

    whole: int
    """All parameters of the model."""
    kept: float
    """At rest on every rank, whatever the number of ranks."""
    shared: float
    """At rest on all ranks together, of which each has its share."""
    more: int
    """The most of a step beyond that, without activations."""
    activations: int

    @classmethod
    def of(cls, two: Mapping[str, Any], three: Mapping[str, Any]) -> Memory:
        """Return what measurements on two and on three ranks say together."""
        of_two, of_three = (found["rest"] + found["packed"] for found in (two, three))  # packed bytes count twice
        shared = max(0.0, (of_two - of_three) * 6.0)
        kept = max(0.0, of_two - shared / 2)
        more = max(0, three["peak"] - three["activations"])
        return cls(three["whole"], kept, shared, more, three["activations"])

    def needed(self, parameters: float) -> int:
        """Return the bytes that must be free on a GPU of the machine, if the model had so many parameters."""
        times = times_larger(parameters, self.whole)
        weights = (self.kept + self.shared / RANKS + self.more) * times
        # The width of a model grows with the root of its parameters.
        activations = self.activations * sqrt(times) * TOKENS / (SAMPLES * TOY_TOKENS)
        return machine_of(MACHINE).needed_bytes(int(NARROWER * (weights + activations)))

    @property
    def largest(self) -> float:
        """The parameters of the largest model that fits."""
        low, high = 0.0, 1e15
        while high - low > 1e6:
            middle = (low + high) / 2
            low, high = (middle, high) if self.needed(middle) <= machine_of(MACHINE).capacity else (low, middle)
        return low


def budget(whole: int, activations: int) -> int:
    """Return the bytes, of the arena's model in fp32, that a rank of 64 may hold of weights and gradients in a step."""
    unused = Memory(whole, 0.0, 0.0, 0, activations)
    times = times_larger(PARAMETERS, whole)
    free = machine_of(MACHINE).capacity - unused.needed(PARAMETERS)
    return int(free / (1 + machine_of(MACHINE).fragmentation) / times / NARROWER)


@dataclass(frozen=True)
class Span:
    """A piece of a played step."""

    row: str
    """compute or network."""
    start: float
    end: float
    """Seconds."""
    name: str


@dataclass(frozen=True)
class Played:
    """A step as it was played."""

    seconds: float
    spans: tuple[Span, ...]

    def total(self, row: str) -> float:
        """Return the seconds of a row's spans."""
        return sum(span.end - span.start for span in self.spans if span.row == row)

    @property
    def waited(self) -> float:
        """Seconds in which nothing was computed."""
        return self.seconds - self.total("compute")


def play(events: list[Event], *, whole: int, own_stream: bool = False) -> Played:
    """Play a step.

    Args:
        events: of `step_log`.
        whole: bytes of all parameters of the arena's model.
        own_stream: as fully_shard on GPUs, where all-gathers have a stream of their own, and nobody waits for a
            reduction before the end of the step. On the CPU, where it was counted, fully_shard waits at once. An
            all-gather may begin when the unit before has been copied out, in forward the one before that (torch's
            `_fsdp_param_group.py`, wait_for_unshard).
    """
    machine = machine_of(MACHINE)
    times = times_larger(PARAMETERS, whole)
    rate = machine.flops * (machine.products or machine.efficiency)
    longer = times * TOKENS / (SAMPLES * TOY_TOKENS) / rate
    now = network = 0.0
    taken = [0.0, 0.0]
    ends: list[float] = []
    gathers: set[int] = set()
    spans: list[Span] = []
    for event in as_fp32(events):
        if event[0] == "compute":
            spans.append(Span("compute", now, now + event[1] * longer, event[2]))
            now = spans[-1].end
        elif event[0] == "send":
            _, kind, nbytes, phase, _ = event
            wire = ring_bytes(kind, int(nbytes * times * NARROWER), RANKS)
            is_gather = kind == "all-gather"
            ready = taken[-2 if phase == "forward" else -1]
            begins = max(network, ready if own_stream and is_gather else now)
            network = begins + ring_time(machine, wire, RANKS)[2]
            if is_gather:
                gathers.add(len(ends))
            ends.append(network)
            spans.append(Span("network", begins, network, f"{kind}, {phase}"))
        elif not own_stream or event[1] in gathers:
            now = max(now, ends[event[1]])
            taken.append(now)
    return Played(max(now, network), tuple(spans))
