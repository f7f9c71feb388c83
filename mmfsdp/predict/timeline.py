"""The timeline of a step: what a rank holds at each event, and the collectives between the events."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.plan import Unit, UnitKind, WrapPlan, ring_bytes
from ..params import TrainParams
from .memory import MAX_MICRO_STEPS, StepWalk, step_walk


class Moment(NamedTuple):
    """Bytes that a rank holds at an event, beside what stays as it is over the step."""

    event: int
    """Number of the event in the step, from 0. Plans with one recording have the same events, and other moments."""
    phase: str
    """forward or backward."""
    kind: str
    """Kind of the event: see MemoryEvent."""
    unit: int
    """Order of the unit whose event it is."""
    gathered: int
    gradients: int
    buffers: int
    """Inputs and outputs of collectives."""
    activations: int

    @property
    def without_activations(self) -> int:
        """The sum of what a policy changes."""
        return self.gathered + self.gradients + self.buffers


class Collective(NamedTuple):
    """A collective of one unit."""

    moment: int
    """Index of the next moment."""
    kind: str
    """all-gather, reduce-scatter or all-reduce."""
    unit: int
    """Order of the unit."""
    wire_bytes: int
    """Bytes that a rank sends."""


@dataclass(frozen=True)
class Timeline:
    """A step of one rank, as its memory events and the wrapper's rules predict it."""

    frozen: int
    """Bytes of frozen weights at rest."""
    trainable: int
    """Bytes of trainable weights at rest."""
    optimizer: int
    module_buffers: int
    moments: tuple[Moment, ...]
    collectives: tuple[Collective, ...]
    gathered_spans: tuple[tuple[int, int, int], ...]
    """(order of the unit, first moment, last moment) of each time that a unit is unsharded or on its way."""
    gathered_to_the_end: tuple[tuple[int, int], ...]
    """(order of the unit, first moment) of those that are freed with the end of the step."""
    whole_gradient_spans: tuple[tuple[int, int, int], ...]
    """The same as `gathered_spans`, of whole gradients that wait for the last micro-step."""
    micro_steps: int
    """Micro-steps in the timeline: at most MAX_MICRO_STEPS of those in the optimizer step."""

    @property
    def most_while_gathered(self) -> dict[int, int]:
        """The most that a rank holds while a unit is gathered, by the unit's order."""
        most: dict[int, int] = {}
        for order, first, last in self.gathered_spans:
            for moment in self.moments[first : last + 1]:
                held = self.constant + moment.without_activations + moment.activations
                most[order] = max(most.get(order, 0), held)
        return most

    @property
    def events(self) -> int:
        """The number of events in the step."""
        return self.moments[-1].event + 1

    def event_of(self, collective: Collective) -> int:
        """Return the number of the event at which a collective begins."""
        return self.moments[min(collective.moment, len(self.moments) - 1)].event

    @property
    def constant(self) -> int:
        """Bytes that do not change over the step."""
        return self.frozen + self.trainable + self.optimizer + self.module_buffers

    @property
    def most(self) -> int:
        """The most that a rank holds without activations."""
        return self.constant + max(moment.without_activations for moment in self.moments)


def step_timeline(plan: WrapPlan, train: TrainParams, *, sources: int = 1) -> Timeline | None:
    """Return the timeline of a step; None for a plan that was made without an example.

    What `cpu_offload` keeps in the host's memory is not in it. sources: of data; each adds a micro-step.
    """
    if not plan.memory_events:
        return None
    recorder = Recorder(plan)
    walk = step_walk(plan, train, sources=sources, recorder=recorder)
    frozen = frozen_bytes_at_rest(plan)
    if walk.offload:  # replicated weights stay on the device
        frozen = sum(frozen_bytes(plan, unit) for unit in plan.units if not unit.sharded)
    return Timeline(
        frozen=frozen,
        trainable=walk.constant.parameters - frozen,
        optimizer=walk.constant.optimizer,
        module_buffers=walk.constant.module_buffers,
        moments=tuple(recorder.moments),
        collectives=tuple(recorder.collectives),
        gathered_spans=tuple(recorder.gathered.spans),
        gathered_to_the_end=tuple(recorder.gathered.began.items()),
        whole_gradient_spans=tuple(recorder.whole_gradients.spans),
        micro_steps=min(train.accumulation * sources, MAX_MICRO_STEPS),
    )


def frozen_bytes_at_rest(plan: WrapPlan) -> int:
    """Return the bytes of frozen weights that a rank holds at rest."""
    return sum(frozen_bytes(plan, unit) for unit in plan.units)


def frozen_bytes(plan: WrapPlan, unit: Unit) -> int:
    """Return the bytes of a unit's frozen weights at rest: of a mixed unit, those that do not train."""
    if unit.kind is UnitKind.MIXED:
        return unit.bytes_at_rest - plan.rules.trained_bytes(unit, plan.shard)
    return unit.bytes_at_rest if unit.kind is UnitKind.FROZEN else 0


@dataclass
class Spans:
    """Note from which moment to which something of a unit is held."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(order of the unit, first moment, last moment)."""
    began: dict[int, int] = field(default_factory=dict)
    """First moment of what is held now, by the unit's order."""

    def note(self, moment: int, held: Set[int]) -> None:
        """Note the orders of the units of which it is held at a moment."""
        for order in held - self.began.keys():
            self.began[order] = moment
        for order in self.began.keys() - held:
            self.spans.append((order, self.began.pop(order), moment - 1))


@dataclass
class Recorder:
    """Note the moments and collectives of a walk."""

    plan: WrapPlan
    moments: list[Moment] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    gathered: Spans = field(default_factory=Spans)
    whole_gradients: Spans = field(default_factory=Spans)

    def note_memory(self, walk: StepWalk, held: dict[str, int]) -> None:
        """Note what is held now. held: the bytes that change, by name."""
        index = len(self.moments)
        self.moments.append(Moment(walk.events - 1, walk.phase, walk.event, walk.order, **held))
        self.gathered.note(index, walk.unsharded.bytes.keys() | walk.gather_outputs.bytes.keys())
        self.whole_gradients.note(index, walk.accumulated.bytes.keys())

    def note_collective(self, walk: StepWalk, kind: str, unit: Unit) -> None:
        """Note a collective that begins now, and the all-reduce over the replicas that follows a reduce-scatter."""
        plan, index = self.plan, len(self.moments)
        if kind == "all-gather":
            parts = [(kind, unit.unsharded_bytes, plan.shard)]
        elif kind == "reduce-scatter":
            parts = [(kind, unit.reduced_bytes, plan.shard)]
            parts.append(("all-reduce", unit.reduced_bytes // plan.shard, plan.replicate))
        else:  # DDP sums gradients in buckets; here a unit's follow its backward
            parts = [(kind, unit.reduced_bytes, plan.world_size)]
        for name, nbytes, ranks in parts:
            if ranks > 1:
                self.collectives.append(Collective(index, name, unit.order, ring_bytes(name, nbytes, ranks)))
