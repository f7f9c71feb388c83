"""Define the plan of a wrapped model as plain data, and print it. Imports no torch.

The words that are ours, each defined once:

- unit: the modules whose parameters one FSDP call groups. One all-gather fetches a unit. It is frozen, trainable, mixed
  (both), or empty (only the root).
- root: the unit of the model itself. It holds the parameters that are in no other unit.
- grad flow: backward needs a unit's weights. Always so for what trains; for a frozen unit, if its input depends on
  something trainable. Its weights then get no gradient, but the gradients of its inputs are computed with them.
- recomputed: backward runs a unit's forward again (activation checkpointing), and needs its weights for that, with or
  without grad flow.
- frozen policy: SHARD gathers a frozen unit each time that it is needed. KEEP gathers it once in forward and keeps it
  until backward is over (until the last forward is, if backward does not need it). REPLICATE puts all of it on every
  rank, without traffic. AUTO chooses one of them per unit.
- at rest: between two steps. Unsharded: gathered from all ranks, as the unit computes.
- micro-step: one forward and backward; an optimizer step has `train.accumulation` of them.
- wire bytes: what one rank sends in one optimizer step; `ring_bytes` has the formulas.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, prod
from typing import Any, NamedTuple

from ..params import Backend, BackwardPrefetch, FrozenPolicy, FSDPParams, OptimizerKind
from ..params.base import from_plain, plain
from ..params.enums import Choice
from ..params.findings import Finding, stop_at_errors
from ..params.in_words import WIDTH, count, size

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1, "int32": 4, "int64": 8}
ITEMSIZE |= {"float8_e4m3fn": 1, "float8_e5m2": 1}  # of codes
"""Bytes of one element, by torch's dtype name."""
ROOT = "(root)"


class UnitKind(Choice):
    """Name the kind of a unit: how much of it trains."""

    FROZEN = "frozen", "None of its parameters trains: it has no gradients, and is never reduced."
    TRAINABLE = "trainable", "All of its parameters train."
    MIXED = "mixed", "Some of its parameters train."
    EMPTY = "empty", "It has no parameters: a root that only starts the other units."

    @classmethod
    def of(cls, trainable: Iterable[bool]) -> UnitKind:
        """Return the kind of some parameters; trainable: for each, whether it trains."""
        values = set(trainable)
        if not values:
            return cls.EMPTY
        if len(values) == 2:
            return cls.MIXED
        return cls.TRAINABLE if True in values else cls.FROZEN


@dataclass(frozen=True)
class Param:
    """A parameter, once, however many names it has."""

    name: str
    """The first dotted name of the parameter in the model."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype in which it rests, by torch's name: float32, bfloat16, ..."""
    trainable: bool
    aliases: tuple[str, ...] = ()
    """Its other names, if it is tied. For quantization codes and scales: the name of the quantized matrix."""
    decays: bool = False
    """AdamW's weight decay applies: a matrix that is no embedding, norm, bias or gate."""
    unused: bool = False
    """Trainable, but the example's backward gives it no gradient: it is not reduced and has no optimizer states."""
    num_weights: int | None = None
    """Number of model weights it stands for if quantized: all of the matrix's for codes, 0 for scales. Else None."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def learns(self) -> bool:
        """Gets gradients and optimizer states."""
        return self.trainable and not self.unused

    @property
    def is_floating(self) -> bool:
        """False for the codes of quantized weights, which no cast may touch."""
        return not self.num_weights and self.dtype.startswith(("float", "bfloat"))

    def padded(self, shards: int) -> int:
        """Elements after FSDP2 pads the first dim so that all shards have as many rows."""
        if not self.shape:
            return self.numel
        return shards * ceil(self.shape[0] / shards) * prod(self.shape[1:])


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters one FSDP call groups: one all-gather fetches them all."""

    # ---- what it holds, and when it runs ----
    name: str
    modules: tuple[str, ...]
    """Dotted names of the modules; an empty one is the model itself."""
    params: tuple[Param, ...]
    order: int
    """Place in the order in which units begin forward; from 0."""
    forward_end: int
    """Place in the order in which units end forward; from 0."""
    kind: UnitKind
    """frozen, trainable, mixed, or empty: a root without parameters, which only starts the others."""
    compute_dtype: str
    """The dtype in which its parameters are gathered and computed, by torch's name; empty: each in its own."""
    grad_flow: bool
    """Backward passes through it, so its weights are needed there."""
    recomputed: bool = False
    """Runs again in backward (activation checkpointing), so its weights are needed there even without grad flow."""
    reduced_twice: bool = False
    """Its backward runs more than once in a micro-step, so with accumulated micro-steps it is reduced twice: first what
    earlier micro-steps left, then what is new."""

    # ---- what the wrapper does with it ----
    frozen_policy: FrozenPolicy | None = None
    """SHARD, KEEP or REPLICATE for a frozen unit; None for others."""
    sharded: bool = True
    """Each rank holds a shard; otherwise each rank holds all of it."""
    reshard_after_forward: bool = False
    """Unsharded weights are freed between forward and backward."""
    reshard_after_backward: bool = True
    """Unsharded weights are freed after each backward; otherwise they stay over accumulated micro-steps. FSDP1 keeps
    all that it does not free after forward."""
    gathers_forward: int = 0
    """All-gathers in one micro-step's forward."""
    gathers_backward: int = 0
    """All-gathers in one micro-step's backward."""

    # ---- bytes ----
    bytes_at_rest: int = 0
    """Bytes of parameters at rest on each rank."""
    unsharded_bytes: int = 0
    """Bytes of the whole unit once gathered, in the compute dtype; padding included."""
    reduced_bytes: int = 0
    """Bytes of gradients that one reduction takes in; padding included."""

    @property
    def is_root(self) -> bool:
        """The unit of the model itself."""
        return self.modules == ("",)

    @property
    def needed_in_backward(self) -> bool:
        """Backward passes through it, or runs it again."""
        return self.grad_flow or self.recomputed

    @property
    def numel(self) -> int:
        """Weights of all parameters."""
        return sum(p.numel if p.num_weights is None else p.num_weights for p in self.params)

    @property
    def trainable_numel(self) -> int:
        """Elements of the trainable parameters."""
        return sum(p.numel for p in self.params if p.trainable)

    def computed_dtype(self, p: Param) -> str:
        """Return the dtype that a parameter is gathered and computed in. Integers of quantized weights are not cast."""
        return self.compute_dtype if self.compute_dtype and p.is_floating else p.dtype

    def gathers(self, phase: str, micro_steps: int) -> int:
        """Return the all-gathers of a phase, forward or backward, in an optimizer step of so many micro-steps."""
        gathers = {"forward": self.gathers_forward, "backward": self.gathers_backward}[phase]
        if self.reshard_after_backward:  # else it stays unsharded after the first micro-step
            gathers *= micro_steps
        return gathers

    def reductions(self, micro_steps: int) -> int:
        """Return how often an optimizer step of so many micro-steps reduces the unit's gradients."""
        if not self.reduced_bytes:
            return 0
        # Reduction waits for the last micro-step (`no_sync`).
        return 2 if self.reduced_twice and micro_steps > 1 else 1


class MemoryEvent(NamedTuple):
    """A point of a micro-step at which a wrapper acts, and the bytes of activations and whole gradients up to it."""

    event: str
    """pre_forward, post_forward, pre_backward or post_backward of a unit; no_gradient after a backward that gave it no
    gradients; free_reduce_input before the end of such a backward, where torch frees the input of the last
    reduce-scatter then; or end, of all of backward."""
    unit: int
    """The unit's order."""
    peak: int
    """Most bytes allocated at one time since the event before."""
    peak_without_grads: int
    """Most bytes without gradients of parameters that were allocated at one time since the event before."""
    allocated: int
    """Bytes allocated at the event."""
    grads: int
    """Bytes of whole gradients of parameters among those allocated."""


def ring_bytes(kind: str, nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a collective on a tensor of nbytes, by the ring algorithm.

    An all-gather or a reduce-scatter passes ranks - 1 of the tensor's parts on; an all-reduce is a reduce-scatter and
    then an all-gather. Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. In a broadcast the
    parts pass along a chain of ranks, whose last sends nothing: the average over the ranks is the same.
    """
    passed_on = nbytes * (ranks - 1) // ranks
    return 2 * passed_on if kind == "all-reduce" else passed_on


@dataclass(frozen=True)
class UnitCollectives:
    """The collectives of one kind that a unit has in one phase of an optimizer step."""

    kind: str
    """all-gather, reduce-scatter or all-reduce."""
    phase: str
    """forward, backward or optimizer."""
    count: int
    bytes: int
    """Bytes of the full tensors: the parts of all ranks together."""
    ranks: int
    """The size of their process group."""


@dataclass(frozen=True)
class WrapPlan:
    """The units in the order in which they run, and the mesh: all that wrapping and the estimate need."""

    fsdp: FSDPParams
    world_size: int
    replicate: int
    """Ranks along the replicate axis: each shard exists so many times."""
    shard: int
    """Ranks along the shard axis."""
    units: tuple[Unit, ...]
    lint: tuple[Finding, ...] = ()
    why: str = ""
    """The choice of AUTO, with its reason."""
    buffer_bytes: int = 0
    """Bytes of the model's buffers (position tables, batch-norm statistics), which every rank holds."""
    memory_events: tuple[MemoryEvent, ...] = ()
    """One micro-step of the example that the plan was made with; empty without one."""
    without_loss: bool = False
    """The example's forward returned no loss. Backward then began at the sum of all its outputs, so the loss's own
    FLOPs and memory are missing."""
    flops: int = 0
    """Multiplications and additions that the example needs in matrix products, convolutions and attention, without what
    runs again (the numerator of MFU); 0 without an example. See `predict/work.py` for the convention."""
    hardware_flops: int = 0
    """Multiplications and additions that run, recomputation included (the numerator of HFU)."""
    attention_flops: int = 0
    """Part of hardware_flops: fused attention without the masked half of causal attention, which GPU kernels skip."""
    causal_flops: int = 0
    """Part of hardware_flops: the masked half of causal attention."""
    moved_bytes: int = 0
    """Bytes that the example's other operators read and write: norms, activations, casts, copies, losses."""
    kernels: int = 0
    """Number of the example's operators that run on the device."""
    fusable_bytes: int = 0
    """Part of moved_bytes that `compile_units` would save at best: where all operators of a unit between two products
    become one kernel."""
    fusable_kernels: int = 0
    """Part of kernels that it would save then."""
    optimizer_states: float = OptimizerKind.ADAMW.states
    """Bytes that the optimizer, and a moving average, keep for each byte of a trainable parameter."""
    optimizer_gathers: int = OptimizerKind.ADAMW.gathers
    """Bytes of each element of a sharded trainable matrix that the optimizer gathers in a step, as Muon does."""

    @property
    def mostly_fp32(self) -> bool:
        """More than half of the model is computed in fp32. Codes of quantized matrices are not."""
        in_fp32 = total = 0
        for unit in self.units:
            total += unit.numel
            in_fp32 += sum(p.numel for p in unit.params if unit.computed_dtype(p) == "float32")
        return 2 * in_fp32 > total

    @property
    def backend(self) -> Backend:
        """The backend that runs: torch's FSDP1 and FSDP2 shard nothing on a mesh of one, for example."""
        return self.fsdp.effective_backend

    @cached_property
    def rules(self) -> Any:
        """Its backend's rules for a unit, a `UnitRules`; see unit_rules.py."""
        return self.backend.rules

    @property
    def refused(self) -> bool:
        """The lint found errors."""
        return any(finding.level == "error" for finding in self.lint)

    @cached_property
    def sharded_units(self) -> tuple[Unit, ...]:
        """The units that FSDP shards; the others are on every rank."""
        return tuple(unit for unit in self.units if unit.sharded)

    @cached_property
    def gathered_units(self) -> tuple[Unit, ...]:
        """The sharded units that forward gathers: all but an empty root, and modules that never run."""
        return tuple(unit for unit in self.sharded_units if unit.gathers_forward)

    @cached_property
    def prefetched_in_forward(self) -> dict[int, Unit]:
        """`unit.order` -> the unit whose all-gather starts when this unit begins its forward (`forward_prefetch`)."""
        ahead = {}
        if self.fsdp.forward_prefetch:
            for unit, following in pairwise(self.gathered_units):
                ahead[unit.order] = following
        return ahead

    @cached_property
    def prefetched_in_backward(self) -> dict[int, Unit]:
        """`unit.order` -> the unit that is gathered ahead of need in this unit's backward (`backward_prefetch`)."""
        ahead = {}
        if self.fsdp.backward_prefetch is not BackwardPrefetch.NO_PREFETCH:
            # Backward runs the units in the opposite order of their ends in forward.
            for earlier, unit in pairwise(sorted(self.gathered_units, key=lambda unit: unit.forward_end)):
                # Prefetch starts in a unit's own backward, and gathers what was freed and may be needed: also a unit
                # whose output nothing reads, so that it has no backward (such as the last norm of Idefics' encoder).
                if unit.needed_in_backward and earlier.needed_in_backward and earlier.reshard_after_forward:
                    ahead[unit.order] = earlier
        return ahead

    @property
    def params(self) -> Iterable[Param]:
        """Every parameter, unit by unit."""
        for unit in self.units:
            yield from unit.params

    @cached_property
    def by_name(self) -> dict[str, Param]:
        """Every parameter by each of its names."""
        names = {}
        for p in self.params:
            names.update(dict.fromkeys((p.name, *p.aliases), p))
        return names

    def collectives_of(self, unit: Unit, micro_steps: int = 1) -> Iterator[UnitCollectives]:
        """Yield the collectives of one unit in an optimizer step of so many micro-steps, in their order."""
        if not unit.sharded:
            yield UnitCollectives("all-reduce", "backward", 1, unit.reduced_bytes, self.world_size)
            return
        for phase in ("forward", "backward"):
            gathers = unit.gathers(phase, micro_steps)
            yield UnitCollectives("all-gather", phase, gathers, gathers * unit.unsharded_bytes, self.shard)
        count = unit.reductions(micro_steps)
        reduced = unit.reduced_bytes * count
        yield UnitCollectives("reduce-scatter", "backward", count, reduced, self.shard)
        # On a mesh of two axes, each shard's gradients are then summed over the replicas.
        yield UnitCollectives("all-reduce", "backward", count, reduced // self.shard, self.replicate)
        if self.optimizer_gathers:
            elements = [p.padded(self.shard) for p in unit.params if p.trainable and p.decays]
            nbytes = self.optimizer_gathers * sum(elements)
            yield UnitCollectives("all-gather", "optimizer", len(elements), nbytes, self.shard)

    @property
    def bytes_at_rest(self) -> int:
        """Bytes of weights that each rank holds between two steps."""
        return sum(unit.bytes_at_rest for unit in self.units)

    def wire_bytes(self, unit: Unit, micro_steps: int = 1) -> int:
        """Return the bytes that a rank sends for one unit in an optimizer step of so many micro-steps."""
        return sum(ring_bytes(each.kind, each.bytes, each.ranks) for each in self.collectives_of(unit, micro_steps))

    def check(self) -> None:
        """Raise ParamError, a ValueError, with every error that the lint found."""
        stop_at_errors(self.lint)

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values."""
        return plain(self)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WrapPlan:
        """Return the plan whose `to_dict` gave these values."""
        return from_plain(cls, values)

    @classmethod
    def from_json(cls, text: str) -> WrapPlan:
        """Return the plan that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        return plan_table(self)


# ---- the table that print(plan) shows ----

MAX_SINGLE_LINES = 24
"""Units of a plan that are printed a line each. In a larger plan, units that differ only in the numbers of their names
share a line."""
WITHOUT_LOSS = (
    "the example's forward returns no loss: FLOPs and peak are those of a backward from the sum of its outputs, "
    "without the loss itself. If the model computes the loss, give the example labels"
)
ROW = "  {:<17} {:>6} {:>9} {:>8} {:>8} {:>8} {:>7} {:>8}"
COLUMNS = "unit\n" + ROW.format("kind policy", "params", "dtype", "held", "gathered", "reduced", "gathers", "sent")
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LEGEND = (
    "*: backward passes through (grad flow). dtype: at rest > in compute. held, gathered, reduced: bytes of a rank at "
    "rest, of the unit while it runs, and of its gradients. gathers: in forward + backward; ^: in backward ahead of "
    "need, while the unit after it runs. sent: bytes a rank sends in a step of one micro-step."
)


def plan_table(plan: WrapPlan) -> str:
    """Return a table of at most 80 columns: the name of each unit, in the order in which they run, above its figures.

    Totals and the lint's findings follow.
    """
    units = [unit for unit in plan.units if unit.params]
    mesh = str(plan.shard) if plan.replicate == 1 else f"{plan.replicate} x {plan.shard}"
    title = f"{plan.backend} on {plan.world_size} ranks ({mesh}), "
    if plan.rules.shards:
        title += f"{plan.fsdp.sharding_strategy}, "
    title += f"{plan.fsdp.auto_wrap_policy}: {len(units)} units"
    rule = "-" * WIDTH
    lines = [*textwrap.wrap(title, WIDTH), COLUMNS, rule]
    for alike in _share_lines(units):
        lines += _unit_lines(plan, alike)
    numel = trainable = sent = 0
    for unit in units:
        numel += unit.numel
        trainable += unit.trainable_numel
        sent += plan.wire_bytes(unit)
    lines.append(rule)
    lines.append(ROW.format("total", count(numel), "", size(plan.bytes_at_rest), "", "", "", size(sent)))
    legend = f"{count(trainable)} of {count(numel)} parameters train. {LEGEND}"
    if trainable and not plan.memory_events:
        legend += " Made without an example: modules are assumed to run in the order in which the model has them."
    if plan.without_loss:
        legend += f" Here {WITHOUT_LOSS}."
    lines += textwrap.wrap(legend, WIDTH)
    notes = [plan.why]
    for finding in plan.lint:
        notes.append(f"{finding.level}: {finding.message}")
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _share_lines(units: list[Unit]) -> list[list[Unit]]:
    """Return the units of each line: in a large plan, those that differ only in the numbers of their names."""
    lines: dict[tuple, list[Unit]] = {}
    for unit in units:
        name = unit.name
        if len(units) > MAX_SINGLE_LINES:
            name = re.sub(r"\d+", "*", name)
        figures = (unit.grad_flow, unit.gathers_backward, unit.bytes_at_rest, unit.unsharded_bytes)
        lines.setdefault((name, unit.kind, *figures), []).append(unit)
    return list(lines.values())


def _unit_lines(plan: WrapPlan, alike: list[Unit]) -> list[str]:
    unit, name = alike[0], alike[0].name
    if len(alike) > 1:
        name = f"{len(alike)} x " + re.sub(r"\d+", "*", name)
    if len(name) > WIDTH:
        # Names differ at their ends.
        name = "..." + name[-(WIDTH - 3) :]
    kind = str(unit.kind)
    if unit.frozen_policy:
        kind += f" {unit.frozen_policy}"
        if unit.grad_flow:
            kind += "*"
    at_rest = _shown_dtype(unit)
    computed = SHORT_DTYPES.get(unit.compute_dtype, unit.compute_dtype) or at_rest
    if any(p.num_weights is not None for p in unit.params):
        at_rest = str(plan.fsdp.frozen_dtype)
    dtype = f"{at_rest}>{computed}"
    gathered = size(unit.unsharded_bytes) if unit.gathers_forward else "-"
    reduced = size(unit.reduced_bytes) if unit.reduced_bytes else "-"
    gathers = f"{unit.gathers_forward}+{unit.gathers_backward}"
    if unit in plan.prefetched_in_backward.values():
        gathers += "^"
    held, sent = size(unit.bytes_at_rest), size(plan.wire_bytes(unit))
    return [name, ROW.format(kind, count(unit.numel), dtype, held, gathered, reduced, gathers, sent)]


def _shown_dtype(unit: Unit) -> str:
    """Return the dtype of a unit's parameters at rest; "mix" if there are several."""
    dtypes = {SHORT_DTYPES.get(p.dtype, p.dtype) for p in unit.params if p.is_floating or p.num_weights is None}
    return dtypes.pop() if len(dtypes) == 1 else "mix"
