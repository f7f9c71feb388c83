"""Memory of a step on one rank: what is at rest, and the peak.

`memory_at_rest` adds up parameters, gradients and optimizer states. `step_walk` passes the memory events of a
micro-step, which `memory_events.py` records (bytes of activations and gradients, each time that a unit begins or ends
forward or backward), and adds what the wrapper allocates at each: unsharded parameters, buffers of collectives, reduced
gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..core.plan import Unit, WrapPlan
from ..core.unit_rules import UnitBytesTable
from ..params import BackwardPrefetch, Device, TrainParams

MAX_MICRO_STEPS = 3
"""Micro-steps that a walk passes: those between the first and the last are alike."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they hold."""

    parameters: int
    """Parameters at rest."""
    module_buffers: int
    """The model's own buffers."""
    optimizer: int = 0
    """The optimizer's states: of AdamW two moments."""
    gradients: int = 0
    """Reduced gradients, and whole ones that wait for the last micro-step."""
    gathered: int = 0
    """Unsharded parameters of the units that are gathered at one time."""
    buffers: int = 0
    """Inputs and outputs of all-gathers and reductions."""
    activations: int = 0
    """Activations, the batch, and gradients that are not reduced yet."""
    when: str = ""
    """The phase and the unit at which these bytes are held, such as `backward of layers.3`; empty at rest."""

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(value for name, value in vars(self).items() if name != "when")

    def plus(self, other: Memory) -> Memory:
        """Return the sum of both, item by item, at the time of this one."""
        items = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "when"}
        return Memory(**items, when=self.when)


def memory_at_rest(plan: WrapPlan, table: UnitBytesTable | None = None) -> Memory:
    """Return what a rank holds without activations, with the most that is gathered and reduced at one time.

    table: of a search that counts the bytes of the same units many times.
    """
    table = table or UnitBytesTable(plan)
    parameters = optimizer = gradients = 0
    gathered = gather_buffer = reduce_buffer = 0
    gathered_for_a_while = []
    for unit in plan.units:
        # Every rank holds its shards, or all of a replicated unit.
        counted = table.of(unit)
        parameters += unit.bytes_at_rest
        optimizer += counted.optimizer
        gradients += counted.gradients
        if not unit.sharded:
            continue
        if unit.reshard_after_forward:
            gathered_for_a_while.append(unit.unsharded_bytes)
        else:
            gathered += unit.unsharded_bytes
        if plan.rules.by_parameter:  # it is gathered into a flat buffer and copied out of it
            gather_buffer = max(gather_buffer, unit.unsharded_bytes)
        reduce_buffer = max(reduce_buffer, unit.reduced_bytes + counted.unreduced)
    gathered += sum(sorted(gathered_for_a_while)[-2:])  # one unit runs while the next is prefetched
    buffers = gather_buffer + reduce_buffer
    return Memory(
        parameters=parameters,
        module_buffers=plan.buffer_bytes,
        optimizer=optimizer,
        gradients=gradients,
        gathered=gathered,
        buffers=buffers,
    )


def memory_on_host(plan: WrapPlan, train: TrainParams) -> Memory | None:
    """Return the part of `memory_at_rest` that lies in CPU memory with `cpu_offload`; None where nothing does."""
    if train.device is Device.CPU or not plan.fsdp.cpu_offload:
        return None
    sharded = replace(plan, units=plan.sharded_units)  # replicated parameters stay on the device
    return replace(memory_at_rest(sharded), module_buffers=0, gathered=0, buffers=0)


def step_walk(
    plan: WrapPlan,
    train: TrainParams,
    *,
    sources: int = 1,
    recorder: WalkRecorder | None = None,
    table: UnitBytesTable | None = None,
    limit: int | None = None,
    first: bool = False,
) -> StepWalk:
    """Pass the memory events of a step, and add up what a rank holds at each.

    Args:
        plan: A plan that was made with an example; without events the walk has what is at rest.
        train: Micro-steps, and the device.
        sources: Number of data sources; each adds a batch to every micro-step.
        recorder: Notes what is held and sent at each event.
        table: The bytes of units of a search that walks with the same units many times. Default: a new one.
        limit: Bytes. A walk that holds more ends there, so that its peak only tells that it is too high.
        first: Pass only the first micro-step, which holds no gradients of earlier ones.

    Returns:
        The walk, with the peak of a rank, optimizer states included, and the most that it holds without activations,
        which may be at another event.
    """
    table = table or UnitBytesTable(plan)
    at_rest, host = memory_at_rest(plan, table), memory_on_host(plan, train)
    # These stay as they are over the step. The buckets of DDP hold its gradients between steps, too.
    constant = replace(at_rest, gathered=0, buffers=0)
    if plan.rules.shards:
        constant = replace(constant, gradients=0)
    if host:
        parameters, optimizer = at_rest.parameters - host.parameters, at_rest.optimizer - host.optimizer
        constant = replace(constant, parameters=parameters, optimizer=optimizer)
    walk = StepWalk(plan, constant, train.device is Device.CPU, host is not None, table, recorder, limit)
    micro_steps = min(train.accumulation * sources, MAX_MICRO_STEPS)
    for i in range(1 if first else micro_steps):
        walk.micro_step(last=i == micro_steps - 1)
    return walk


class BytesOfUnits:
    """Bytes by the order of a unit, with their sum, which a walk needs at every event."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.total = 0

    def __contains__(self, order: int) -> bool:
        return order in self.bytes

    def __setitem__(self, order: int, nbytes: int) -> None:
        self.total += nbytes - self.bytes.get(order, 0)
        self.bytes[order] = nbytes

    def pop(self, order: int) -> int:
        """Remove a unit, and return its bytes; 0 for one that is not there."""
        nbytes = self.bytes.pop(order, 0)
        self.total -= nbytes
        return nbytes

    def clear(self) -> None:
        """Remove all units."""
        self.bytes.clear()
        self.total = 0


class WalkRecorder(Protocol):
    """Notes what a walk passes; `Recorder` of timeline.py is one."""

    def note_memory(self, walk: StepWalk, held: dict[str, int]) -> None:
        """Note the bytes that are held now beside what is constant, by field of Memory."""

    def note_collective(self, walk: StepWalk, kind: str, unit: Unit) -> None:
        """Note that a unit's all-gather, reduce-scatter or all-reduce begins."""


@dataclass
class StepWalk:
    """Follow what the wrapper holds while the memory events of a step pass. File names are those of torch.

    Each dict has bytes by the order of a unit.
    """

    plan: WrapPlan
    constant: Memory
    """Memory that does not change over the step."""
    on_cpu: bool
    offload: bool
    table: UnitBytesTable
    recorder: WalkRecorder | None = None
    limit: int | None = None
    """Bytes; the walk ends where it holds more."""
    unsharded: BytesOfUnits = field(default_factory=BytesOfUnits)
    """Gathered parameters."""
    gather_outputs: BytesOfUnits = field(default_factory=BytesOfUnits)
    """FSDP2: outputs of all-gathers that are not copied to the parameters yet."""
    copied_output: int = 0
    """FSDP2: bytes of the last output of an all-gather that forward copied to the parameters, and still holds."""
    reduce_input: int = 0
    """FSDP2: bytes of the input of the last reduce-scatter."""
    accumulated: BytesOfUnits = field(default_factory=BytesOfUnits)
    """Whole gradients of earlier micro-steps."""
    reduced: BytesOfUnits = field(default_factory=BytesOfUnits)
    """Bytes of this rank's part of reduced gradients."""
    gathers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """All-gathers, by phase and order of the unit."""

    def __post_init__(self) -> None:
        self.peak_bytes = self.most_bytes = self.constant.bytes
        # What is held at the peak, and at the most without activations, as fields of Memory; empty at rest.
        self.at_peak: dict[str, Any] = {}
        self.at_most: dict[str, Any] = {}
        self.phase, self.last = "forward", False
        self.event, self.order = "", 0  # what the event is, and the order of its unit
        self.events = 0  # that have come
        self.activations = 0
        self.finished: set[int] = set()  # orders of units whose backward is over, in this micro-step
        # The rest of `constant` is counted again at each event.
        self.fixed_bytes = self.constant.parameters + self.constant.module_buffers + self.constant.optimizer
        self.flat = self.plan.rules.flat  # FSDP1

    @property
    def peak(self) -> Memory:
        """The most that is held at one time."""
        return replace(self.constant, **self.at_peak)

    @property
    def without_activations(self) -> Memory:
        """The most that is held at one time, if activations are not counted."""
        return replace(self.constant, **self.at_most)

    def micro_step(self, *, last: bool) -> None:
        """Pass the events of a micro-step. last: its backward reduces the gradients."""
        self.phase, self.last = "forward", last
        self.finished.clear()
        for event in self.plan.memory_events:
            unit = self.plan.units[event.unit]
            if event.event not in ("pre_forward", "post_forward"):
                self.phase = "backward"
            self.event, self.order = event.event, unit.order
            if event.event != "free_reduce_input":  # so that all ways to wrap a model have the same number of events
                self.events += 1
            # Autograd adds to the gradients of earlier micro-steps in place; FSDP1 makes a new flat one each time.
            in_place = self.accumulated.total > 0 and not self.flat
            self.activations, activations_after = event.peak, event.allocated
            if in_place:
                self.activations = event.peak_without_grads
                activations_after -= event.grads
            self.compare()
            self.activations = activations_after
            match event.event:
                case "pre_forward":
                    self.pre_forward(unit)
                case "post_forward":
                    self.post_forward(unit)
                case "pre_backward":
                    self.pre_backward(unit)
                case "post_backward":
                    self.post_backward(unit)
                case "no_gradient":
                    self.no_gradient(unit)
                case "free_reduce_input":
                    self.free_reduce_input(unit)
                case "end":
                    self.end()
            if self.limit is not None and self.peak_bytes > self.limit:
                return

    def compare(self, transient: int = 0) -> None:
        """Compare what is allocated now to the peak. transient: bytes of buffers that are freed immediately."""
        gathered, gather_outputs = self.unsharded.total, self.gather_outputs.total
        gradients = self.constant.gradients + self.accumulated.total + self.reduced.total
        buffers = gather_outputs + self.copied_output + self.reduce_input + transient
        without_activations = self.fixed_bytes + gathered + gradients + buffers
        held = without_activations + self.activations
        is_peak = held > self.peak_bytes
        is_most = without_activations > self.most_bytes
        if not (is_peak or is_most or self.recorder):
            return
        now: dict[str, Any] = {"gathered": gathered, "gradients": gradients, "buffers": buffers}
        now["activations"] = self.activations
        if self.recorder:
            self.recorder.note_memory(self, dict(now))
        now["when"] = f"{self.phase} of {self.plan.units[self.order].name}"
        if is_peak:
            self.at_peak, self.peak_bytes = now, held
        if is_most:
            self.at_most, self.most_bytes = now | {"activations": 0}, without_activations

    def pre_forward(self, unit: Unit) -> None:
        """Gather the unit, and start the all-gathers that are prefetched in forward."""
        self.gather(unit)
        if self.phase == "forward":  # nothing is prefetched where forward runs again in backward
            self.all_gather(self.plan.prefetched_in_forward.get(unit.order))

    def post_forward(self, unit: Unit) -> None:
        """Reshard the unit, unless backward needs it next."""
        if unit.is_root:
            self.copied_output = 0  # _fsdp_state.py, _post_forward of the root
        # FSDP2 keeps a unit that is recomputed in backward: its own backward comes next.
        if unit.reshard_after_forward and (self.flat or self.phase == "forward"):
            self.reshard(unit)

    def pre_backward(self, unit: Unit) -> None:
        """Gather the unit if backward needs its weights, and start the all-gather of the next one."""
        if unit.needed_in_backward:
            self.gather(unit)
        if self.plan.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self.all_gather(self.plan.prefetched_in_backward.get(unit.order))

    def all_gather(self, unit: Unit | None) -> None:
        """Start a unit's all-gather, unless there is none, it is unsharded, or its all-gather has started."""
        if unit is None or not unit.sharded or unit.order in self.unsharded or unit.order in self.gather_outputs:
            return
        if unit.params:
            self.gathers[self.phase, unit.order] += 1
            if self.recorder:
                self.recorder.note_collective(self, "all-gather", unit)
        alone = self.plan.shard == 1  # then nothing is sent
        transient = 0 if alone else self.table.of(unit).cast_shard
        if self.offload:  # a copy from the host comes first
            transient += unit.bytes_at_rest
        # gloo fills a buffer of its own and copies that (ProcessGroupGloo.cpp, allgather). Its two threads may hold two
        # such buffers at a time, depending on the load; one is counted.
        if self.on_cpu and not alone:
            transient += unit.unsharded_bytes
        if self.flat:  # alone, FSDP1 computes with the flat parameter itself, or with a cast of it
            in_place = alone and not self.table.of(unit).cast_shard
            self.unsharded[unit.order] = 0 if in_place else unit.unsharded_bytes
        else:  # one flat output for all parameters (_fsdp_collectives.py, foreach_all_gather), for more than one rank
            self.gather_outputs[unit.order] = 0 if alone else unit.unsharded_bytes
        self.compare(transient)

    def gather(self, unit: Unit) -> None:
        """Unshard a unit: start its all-gather and wait for it."""
        self.all_gather(unit)
        if unit.order not in self.gather_outputs:
            return
        # FSDP2 copies the output to the parameters. In forward it keeps the output until the next unit is copied
        # (_fsdp_param_group.py, wait_for_unshard).
        self.copied_output = 0
        self.unsharded[unit.order] = unit.unsharded_bytes
        self.compare()
        output = self.gather_outputs.pop(unit.order)
        if self.phase == "forward":
            self.copied_output = output

    def reshard(self, unit: Unit) -> None:
        """Free the unit's unsharded parameters."""
        if self.last or unit.reshard_after_backward:
            self.unsharded.pop(unit.order)

    def post_backward(self, unit: Unit) -> None:
        """Reduce a unit's gradients in the last micro-step, else keep them."""
        computed = self.table.of(unit).unreduced
        earlier = self.accumulated.pop(unit.order)
        self.finished.add(unit.order)
        if self.flat:
            self.compare(computed + earlier)  # autograd copies the parameters' gradients into one flat gradient
            self.activations -= computed
        self.reshard(unit)
        if not unit.reduced_bytes:
            return
        if not self.last:
            self.accumulated[unit.order] = computed if self.flat else unit.reduced_bytes
        elif unit.sharded:
            self.reduce(unit, computed, earlier)
        elif self.recorder:
            self.recorder.note_collective(self, "all-reduce", unit)

    def no_gradient(self, unit: Unit) -> None:
        """End a backward that gave the unit no gradients: reduce those of earlier micro-steps, or only reshard."""
        if unit.order in self.accumulated:
            self.post_backward(unit)
        else:
            self.reshard(unit)

    def free_reduce_input(self, unit: Unit) -> None:
        """Free the input of the last reduce-scatter when a sharded unit without gradients ends its backward."""
        if self.last and unit.sharded:
            self.reduce_input = 0

    def reduce(self, unit: Unit, computed: int, earlier: int) -> None:
        """Reduce-scatter gradients: bytes that this micro-step's backward computed, and of earlier ones."""
        if self.recorder:
            self.recorder.note_collective(self, "reduce-scatter", unit)
        reduced = 0 if self.offload else self.table.of(unit).gradients
        gloo_copy = 0
        if self.on_cpu and self.plan.shard > 1:  # gloo all-reduces a copy (ProcessGroupGloo.cpp, reduce_scatter)
            gloo_copy = unit.reduced_bytes
        if self.flat:  # _runtime_utils.py, _post_backward_hook
            if self.plan.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
                ahead = self.plan.prefetched_in_backward.get(unit.order)
                if ahead and ahead.order not in self.finished:  # _runtime_utils.py, _get_handle_to_prefetch
                    self.all_gather(ahead)
            self.reduced[unit.order] = reduced
            self.compare(computed + earlier + self.table.of(unit).cast_gradient + gloo_copy)
            return
        # FSDP2 copies the gradients to one input and frees them; the input stays until the next reduce-scatter, or the
        # event `free_reduce_input` (_fsdp_collectives.py, foreach_reduce; _fsdp_param_group.py, post_backward).
        self.reduce_input = unit.reduced_bytes
        self.compare()
        if not earlier:
            self.activations -= computed
        self.reduced[unit.order] = reduced
        self.compare(gloo_copy)

    def end(self) -> None:
        """Free what backward leaves: FSDP2's buffers, and units that it gathered and did not need."""
        self.copied_output = self.reduce_input = 0
        self.gather_outputs.clear()
        for unit in self.plan.units:
            self.reshard(unit)
