"""The order of collectives in a step, by the plan; and the place in it of a collective that a rank has entered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.plan import Unit, WrapPlan
from ...params import TrainParams
from ...predict.memory import StepWalk, step_walk
from .entered import Entry

COUNTS, FIGURES = "token counts at the start of a step", "loss and gradient norm at the end of a step"
"""Sums of the two small all-reduces of `train_step`: a number for each source, and one or three more."""
NUMBER_BYTES = 8
"""Bytes of one number: they are float64."""


class Planned(NamedTuple):
    """A collective of the plan."""

    kind: str
    what: str
    """The unit, or COUNTS, or FIGURES."""
    phase: str
    """forward, backward, or "" where that is not known."""
    nbytes: int
    """Bytes of the full tensor."""


@dataclass(frozen=True)
class StepOrder:
    """The collectives of a step."""

    collectives: tuple[Planned, ...]
    in_order: bool
    """True if the collectives are in the order of the step; otherwise the plan tells only which there are."""

    def fit(self, history: Sequence[Entry]) -> int:
        """Return how many of the last entries follow each other in the plan; 0 if the last one is not in it."""
        return max(self._matches(history), default=0)

    def locate(self, history: Sequence[Entry]) -> Planned | None:
        """Return the planned collective that the last entry is, by its kind and size and by what came before it.

        None where several units come into question. The phase is empty if it may be either.
        """
        matches = self._matches(history)
        longest = max(matches, default=0)
        if not longest:
            return None
        found: list[Planned] = []
        for planned, length in zip(self.collectives, matches, strict=True):
            if length == longest:
                found.append(planned)
        if len({planned.what for planned in found}) > 1:
            return None
        phases = {planned.phase for planned in found}
        return found[0] if len(phases) == 1 else found[0]._replace(phase="")

    def _matches(self, history: Sequence[Entry]) -> list[int]:
        """Return how many of the last entries match the collectives up to each one, backward over the step's start.

        Entries that are not in the plan are left out, and so are sums of `train_step` in a loop that does not call it.
        """
        known = [entry for entry in history if any(_is(entry, planned) for planned in self.collectives)]
        if not known or known[-1] != history[-1]:
            return [0] * len(self.collectives)
        used = []
        for index, planned in enumerate(self.collectives):
            if planned.what not in (COUNTS, FIGURES) or any(_is(entry, planned) for entry in known):
                used.append(index)
        most = len(used) if self.in_order else 1
        lengths = [0] * len(self.collectives)
        for place, index in enumerate(used):
            length = 0
            while length < min(most, len(known)) and _is(
                known[-1 - length], self.collectives[used[(place - length) % len(used)]]
            ):
                length += 1
            lengths[index] = length
        return lengths


def _is(entry: Entry, planned: Planned) -> bool:
    same_kind = entry.kind == planned.kind
    if planned.kind == "reduce-scatter" and entry.kind == "all-reduce":  # gloo's
        same_kind = True
    return same_kind and entry.nbytes == planned.nbytes


def step_order(plan: WrapPlan, train: TrainParams, *, sources: int = 1) -> StepOrder:
    """Return the collectives of a step of `train_step`. sources: of data; each adds a micro-step.

    Of the micro-steps between the first and the last, which are alike, there is one.
    """
    if not plan.memory_events:
        return StepOrder(tuple(_of_units(plan)), in_order=False)
    recorder = _Recorder(plan)
    step_walk(plan, train, sources=sources, recorder=recorder)
    counts = Planned("all-reduce", COUNTS, "", (1 + sources) * NUMBER_BYTES)
    figures = Planned("all-reduce", FIGURES, "", (3 + sources) * NUMBER_BYTES)
    return StepOrder((counts, *recorder.collectives, figures), in_order=True)


def _of_units(plan: WrapPlan) -> list[Planned]:
    """Return the collectives of a plan that was made without an example."""
    collectives = []
    for unit in plan.sharded_units:
        if unit.unsharded_bytes:
            collectives.append(Planned("all-gather", unit.name, "", unit.unsharded_bytes))
        if unit.reduced_bytes:
            collectives.append(Planned("reduce-scatter", unit.name, "backward", unit.reduced_bytes))
    return collectives


@dataclass
class _Recorder:
    """Note the collectives of a walk."""

    plan: WrapPlan
    collectives: list[Planned] = field(default_factory=list)

    def note_memory(self, walk: StepWalk, held: dict[str, int]) -> None:
        """Memory is not what is asked here."""

    def note_collective(self, walk: StepWalk, kind: str, unit: Unit) -> None:
        """Note a collective that begins now, and the all-reduce over the replicas that follows a reduce-scatter."""
        if kind == "all-reduce" and not self.plan.rules.shards:
            return  # DDP sums gradients in buckets of its own
        nbytes = unit.unsharded_bytes if kind == "all-gather" else unit.reduced_bytes
        if kind == "all-reduce" or self.plan.shard > 1:
            self.collectives.append(Planned(kind, unit.name, walk.phase, nbytes))
        if kind == "reduce-scatter" and self.plan.replicate > 1:
            self.collectives.append(Planned("all-reduce", unit.name, walk.phase, nbytes // self.plan.shard))
