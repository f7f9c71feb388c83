"""Answers of `fit`; print them for a table."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from ...params.in_words import WIDTH, size
from ...predict import Machine

WITH_TEXT = "with the text that comes with each"


@dataclass(frozen=True)
class Way:
    """A frozen policy with a recomputation of activations."""

    change: dict[str, Any]
    """Parameters by dotted name."""
    peak: int = 0
    """Bytes."""
    wire: int = 0
    """Bytes that a rank sends in a step."""
    flops: int = 0
    """Of a micro-step, recomputation included."""
    fits: bool = False
    why_not: str = ""
    """The error, where there is no such plan."""

    def order(self) -> tuple[int, int, int]:
        """Return what ways are compared by: bytes sent, then FLOPs, then the peak."""
        return self.wire, self.flops, self.peak

    @staticmethod
    def words_of(policy: object, recompute: str) -> str:
        """Return a policy and a recomputation as words."""
        return f"{policy}, recomputing {recompute}"

    @property
    def words(self) -> str:
        """Return it as words."""
        return self.words_of(self.change["fsdp.frozen_policy"], self.change["fsdp.activation_checkpointing"])


@dataclass(frozen=True)
class Answer:
    """An answer of `fit`."""

    asked: str
    unit: str
    value: int | str
    """The answer; 0 if nothing fits."""
    now: int | str
    """The value of the run as it is set."""
    change: dict[str, Any] = field(default_factory=dict)
    """Parameters that make it so, by dotted name; empty where the data do, and where nothing fits."""
    peak: int | None = None
    """Bytes of the tensors of a rank at the answer."""
    further: int | None = None
    """One step further, where it does not fit; None if nothing is too much."""
    further_peak: int | None = None
    why_not: str = ""
    """The mistake that one step further is, where memory is not what limits it."""
    read_off: bool = False
    """The peak is read off straight lines through two smaller traces, since a trace of this size may take minutes."""
    ways: tuple[Way, ...] = ()
    """All that were compared, those that send least first."""


@dataclass(frozen=True)
class Curve:
    """The peak as a straight line over visual tokens: peak = base + slope x tokens."""

    base: float
    """Bytes."""
    slope: float
    """Bytes for each visual token of a rank's micro-batch."""
    points: tuple[tuple[int, int], ...]
    """Tokens and peak of each size that was looked at."""

    def __str__(self) -> str:
        off = max(abs(self.base + self.slope * tokens - peak) / peak for tokens, peak in self.points)
        words = f"peak = {size(self.base)} + {size(self.slope)} x visual tokens of a rank's micro-batch, {WITH_TEXT}"
        return f"{words}; {len(self.points)} sizes lie within {off:.1%} of it"


@dataclass(frozen=True)
class Fit:
    """All answers about a run on a machine."""

    machine: Machine
    answers: tuple[Answer, ...]
    curve: Curve | None = None

    @property
    def all_fit(self) -> bool:
        """True if each answer has a value that fits."""
        return all(answer.value for answer in self.answers)

    def __str__(self) -> str:
        machine = self.machine
        lines = [f"{machine.name}: {size(machine.capacity)} on each GPU, as torch reports it"]
        words = f"a GPU needs more than its tensors: {machine.margin} (CUDA's context, NCCL's buffers, gaps)"
        if not machine.needed_bytes(0):
            words = "nothing is needed beyond the tensors"
        lines += textwrap.wrap(words, WIDTH)
        for answer in self.answers:
            lines += ["", *self._lines(answer)]
        if self.curve:
            lines += ["", *textwrap.wrap(str(self.curve), WIDTH, subsequent_indent="  ")]
        return "\n".join(lines)

    def _lines(self, answer: Answer) -> list[str]:
        """Return the lines of an answer."""
        fewest = answer.asked == "gpus"
        head = "fewest" if fewest else "best" if answer.ways else "largest"
        value = f"{answer.value:,}" if isinstance(answer.value, int) else answer.value
        if not answer.value:
            value = "none fits"
        now = f"{answer.now:,}" if isinstance(answer.now, int) else answer.now
        lines = textwrap.wrap(f"{head} {answer.asked}: {value} ({answer.unit}; the run has {now})", WIDTH)
        if answer.peak is not None:
            lines += self._row(f"{value}", answer.peak)
        if answer.further_peak is not None:
            lines += self._row(f"{answer.further:,}", answer.further_peak)
        elif answer.why_not:
            lines += textwrap.wrap(f"{answer.further:,}: {answer.why_not}", WIDTH, initial_indent="  ")
        elif answer.further is None and answer.value and not answer.ways:
            lines.append("  nothing further was tried")
        if answer.read_off:
            words = "read off straight lines through two smaller traces: one of this size may take minutes"
            lines += textwrap.wrap(words, WIDTH, initial_indent="  ")
        for way in answer.ways:
            if not way.why_not:
                fits = "fits" if way.fits else "does not fit"
                needed = size(self.machine.needed_bytes(way.peak))
                lines.append(f"  {way.words:<30} sends {size(way.wire):>9}, needs {needed:>9}: {fits}")
        if answer.change:
            flags = " ".join(f"--{name.replace('_', '-')} {plain(value)}" for name, value in answer.change.items())
            lines += textwrap.wrap(flags, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return lines

    def _row(self, value: str, peak: int) -> list[str]:
        """Return the line of a value and its peak."""
        needed = self.machine.needed_bytes(peak)
        fits = "fits" if needed <= self.machine.capacity else "does not fit"
        return [f"  {value}: tensors {size(peak)}, a GPU needs {size(needed)}: {fits}"]


def plain(value: Any) -> Any:
    """Return a value of an enum as its text, and all others as they are."""
    return value.value if hasattr(value, "value") else value
