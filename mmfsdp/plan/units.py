"""WrapPlan: which parameters share a shard, as plain data. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from ..params import Backend, FrozenPolicy, FSDPParams, ParamError
from ..params.run import build, plain

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1, "int32": 4, "int64": 8}
"""Bytes of one element, by torch's dtype name."""
ROOT = "(root)"


@dataclass(frozen=True)
class Param:
    """A parameter, once, whatever its number of names."""

    name: str
    """Its first dotted name in the model."""
    shape: tuple[int, ...]
    dtype: str
    """At rest, by torch's name: float32, bfloat16, ..."""
    trainable: bool
    aliases: tuple[str, ...] = ()
    """Its other names, where it is tied."""
    decays: bool = False
    """AdamW's weight decay applies: a matrix that is no embedding, norm, bias or gate."""
    idle: bool = False
    """Trainable, but the example's backward gives it no gradient: nothing of it is reduced, and it has no states."""

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    def padded(self, shards: int) -> int:
        """Elements after FSDP2 pads the first dim so that every shard is as large as the first."""
        rest = self.numel // self.shape[0] if self.shape and self.shape[0] else 0
        return shards * ceil(self.shape[0] / shards) * rest if self.shape else 1


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters one call groups: one all-gather fetches them all."""

    name: str
    modules: tuple[str, ...]
    """Dotted names of the modules; an empty one is the model itself."""
    params: tuple[Param, ...]
    order: int
    """Place in the order in which units begin forward; from 0."""
    ends: int
    """Place in the order in which units end forward; from 0."""
    kind: str
    """frozen, trainable, mixed, or empty (only the root: it holds nothing and starts the others)."""
    compute_dtype: str
    """What its parameters are gathered and computed in, by torch's name; empty: each in its own."""
    grad_flow: bool
    """Backward passes through it, so its weights are needed there."""
    frozen_policy: FrozenPolicy | None
    """SHARD, KEEP or REPLICATE for a frozen unit; None for others."""
    sharded: bool
    """Each rank holds a part; else each holds the whole."""
    reshard_after_forward: bool
    """Gathered weights are freed between forward and backward."""
    hold: bool
    """Stays gathered over accumulated micro-steps. FSDP1 does so with all that it does not free after forward."""
    gathers_forward: int = 0
    """All-gathers in one micro-step's forward."""
    gathers_backward: int = 0
    """All-gathers in one micro-step's backward."""
    held_bytes: int = 0
    """Bytes of parameters at rest on each rank."""
    gathered_bytes: int = 0
    """Bytes of the whole unit once gathered, as computed with; padding included."""
    reduced_bytes: int = 0
    """Bytes of gradients that one reduction takes in, padding included."""
    reduced_twice: bool = False
    """With accumulated micro-steps: its backward runs several times in one, the first of which reduces what earlier
    micro-steps left, and the last what is new."""
    ahead_forward: tuple[str, ...] = ()
    """The units that are sent for when this one begins forward (`forward_prefetch`)."""
    ahead_backward: str = ""
    """The unit that is gathered ahead of need while this one's backward runs (`backward_prefetch`)."""

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel for p in self.params)

    @property
    def trainable_numel(self) -> int:
        """Elements of the trainable parameters."""
        return sum(p.numel for p in self.params if p.trainable)


@dataclass(frozen=True)
class Moment:
    """When a wrapper acts in a micro-step, and the bytes of activations and whole gradients up to then."""

    event: str
    """What happens at its end: a unit's forward begins (enter) or is over (leave), its backward begins (back) or is
    over (after), or all of backward is (end)."""
    unit: int
    """The unit's order."""
    peak: int
    """The most that lived at a time since the moment before."""
    bare: int
    """The same without gradients of parameters."""
    live: int
    """What lives when it comes."""
    grads: int
    """Of it, gradients of parameters."""
    logits: int
    """Of the peak, what is as wide as the vocabulary."""
    random: int = 0
    """Beside what lives, on the CPU: states of its random numbers, one for each checkpointed call."""


@dataclass(frozen=True)
class Finding:
    """One mistake that the lint saw, with its fix."""

    level: str
    """error (a launch stops) or warning."""
    code: str
    message: str


def stop_at_errors(findings: Iterable[Finding]) -> None:
    """Raise ParamError with every error among findings."""
    errors = dict.fromkeys(f.message for f in findings if f.level == "error")
    if errors:
        raise ParamError("plan", "; ".join(errors))


@dataclass(frozen=True)
class WrapPlan:
    """What `apply_plan` will do: the units in order, and the mesh."""

    fsdp: FSDPParams
    world_size: int
    replicate: int
    """Ranks along the replicate axis: each shard exists so many times."""
    shard: int
    """Ranks along the shard axis."""
    units: tuple[Unit, ...]
    lint: tuple[Finding, ...] = ()
    why: str = ""
    """What AUTO chose, and why."""
    buffer_bytes: int = 0
    """Of the model's buffers (position tables, batch-norm statistics), which every rank holds."""
    beside: tuple[tuple[str, str, int], ...] = ()
    """(kind, phase, bytes) of each collective of a step that is no unit's: of buffers, where others wrap by DDP."""
    moments: tuple[Moment, ...] = ()
    """One micro-step of the example that the plan was made with; empty without one."""
    flops: int = 0
    """Multiplications and additions of its matrix products, convolutions and attention; 0 without an example."""
    moved: int = 0
    """Bytes that its other operators read and write."""
    calls: int = 0
    """Operators that it calls, views not counted."""
    operators: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    """The same with the shapes of their arguments, to be timed; not in JSON."""

    @property
    def backend(self) -> Backend:
        """The backend that really runs."""
        return self.fsdp.effective_backend

    @property
    def refused(self) -> bool:
        """The lint found errors."""
        return any(f.level == "error" for f in self.lint)

    @property
    def params(self) -> Iterable[Param]:
        """Every parameter, unit by unit."""
        return (p for unit in self.units for p in unit.params)

    @cached_property
    def by_name(self) -> dict[str, Param]:
        """Every parameter by each of its names."""
        return {name: p for p in self.params for name in (p.name, *p.aliases)}

    def diff(self, other: WrapPlan) -> str:
        """What another plan changes: choices, units and their bytes, and totals; empty where nothing."""
        from .table import plan_diff

        return plan_diff(self, other)

    def check(self) -> None:
        """Raise ParamError, a ValueError, with every error that the lint found."""
        stop_at_errors(self.lint)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        moments = [list(astuple(m)) for m in self.moments]  # short, since they are many
        found = plain(asdict(replace(self, moments=(), operators=()))) | {"moments": moments}
        del found["operators"]
        return found

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> WrapPlan:
        """The inverse of `to_dict`."""
        units = tuple(_unit(u) for u in values["units"])
        lint = tuple(Finding(**f) for f in values["lint"])
        moments = tuple(Moment(*m) for m in values.get("moments", ()))
        made = {"fsdp": build(FSDPParams, values["fsdp"]), "units": units, "lint": lint, "moments": moments}
        return cls(**{**values, **made, "beside": tuple(tuple(one) for one in values.get("beside", ()))})

    @classmethod
    def from_json(cls, text: str) -> WrapPlan:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        from .table import plan_table

        return plan_table(self)


def _unit(values: dict[str, Any]) -> Unit:
    params = tuple(Param(**{**p, "shape": tuple(p["shape"]), "aliases": tuple(p["aliases"])}) for p in values["params"])
    policy = FrozenPolicy(values["frozen_policy"]) if values["frozen_policy"] else None
    names = {field: tuple(values[field]) for field in ("modules", "ahead_forward")}
    return Unit(**{**values, **names, "params": params, "frozen_policy": policy})
