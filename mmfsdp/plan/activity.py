"""What a step keeps beside parameters: activations and whole gradients, moment by moment, from a run on fake tensors.

Forward and backward really run, with autograd, checkpointing and the formats of the plan, but no tensor has storage:
what is counted is when each storage would have been made and let go.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from ..params import Backend
from .build import with_bytes
from .checkpointing import checkpoint_activations
from .fake import FakeOperators, Kind, fake, fake_copy, fake_mode, tensors_of
from .units import Moment, Param, Unit, WrapPlan
from .work import Operator, operator_of


class Recorded(NamedTuple):
    """What a plan learns from one micro-step; see its fields."""

    moments: tuple[Moment, ...]
    flops: int
    moved: int
    calls: int
    operators: tuple[Operator, ...]
    idle: frozenset[str]
    """Trainable parameters (first names) that got no gradient."""
    twice: frozenset[int]
    """Orders of units of whose backwards only the last had gradients."""


def record(model: nn.Module, plan: WrapPlan, example: dict[str, Any]) -> Recorded:
    """The moments of one micro-step at which units gather, free or reduce, what lives between them, and its work.

    example: keyword arguments of a forward. Raises ValueError where the model does not take it.
    """
    mode = fake_mode()
    buffers = plan.fsdp.buffer_dtype
    twin = fake_copy(model, mode, _formats(plan), buffers.to_torch() if buffers else None).train()
    inputs = tree_map(lambda v: fake(v, mode) if isinstance(v, torch.Tensor) else v, example)
    for name in {p.name for unit in plan.units for p in _graded(plan, unit)}:
        twin.get_parameter(name).requires_grad_()
    film = _Film(mode, plan, twin, _vocabulary(twin))
    checkpoint_activations(twin, plan, lambda: (nullcontext(), _Repetition(film)))
    given = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    film.known = {t.untyped_storage()._cdata for t in [*twin.parameters(), *twin.buffers(), *given]}
    film.live = film.peak = film.bare = sum(t.untyped_storage().nbytes() for t in given)
    autocast = plan.backend is Backend.DDP and plan.fsdp.mixed_precision
    try:
        with mode, film:
            with torch.autocast("cpu", dtype=autocast.to_torch()) if autocast else nullcontext():
                out = twin(**inputs)
            loss = _loss(out)
            del out, inputs  # `given` stay: a storage made in the place of one of theirs would pass for it
            if loss is not None:
                loss.backward()
            film.end()
    except Exception as error:
        raise ValueError(f"example: the model's step failed on it ({type(error).__name__}: {error})") from error
    return Recorded(tuple(film.moments), *film.work(), frozenset(film.idle), frozenset(film.twice))


def with_recorded(plan: WrapPlan, found: Recorded) -> WrapPlan:
    """The plan with the moments and the work of one micro-step, and with what its backward does not reach."""
    learnt = found._asdict()
    idle, twice = learnt.pop("idle"), learnt.pop("twice")
    units = plan.units
    if (idle or twice) and plan.backend is not Backend.DDP:  # which has no place for what gets no gradient
        units = tuple(
            replace(
                u,
                params=tuple(replace(p, idle=p.name in idle) for p in u.params),
                reduced_twice=plan.backend is Backend.FSDP2 and u.order in twice,
            )
            for u in units
        )
        units = tuple(with_bytes(u, plan.fsdp, plan.shard) for u in units)
    return replace(plan, units=units, **learnt)


def recorded_alike(plan: WrapPlan) -> Hashable:
    """All of a plan that its moments depend on: plans alike in this have the same, for one model and example."""
    fsdp = plan.fsdp
    units = tuple(
        (
            u.modules,
            u.order,
            u.sharded,
            u.compute_dtype,
            u.grad_flow,
            *((p.name, p.dtype, p.trainable) for p in u.params),
        )
        for u in plan.units
    )
    return plan.backend, fsdp.mixed_precision, fsdp.buffer_dtype, fsdp.activation_checkpointing, units


def _formats(plan: WrapPlan) -> dict[str, torch.dtype]:
    """What each parameter (first name) is computed with, as gathered."""
    found = {}
    for unit in plan.units:
        for p in unit.params:
            gathered = unit.compute_dtype if unit.compute_dtype and plan.backend is not Backend.DDP else p.dtype
            found[p.name] = getattr(torch, gathered if _floats(p) else p.dtype)
    return found


def _graded(plan: WrapPlan, unit: Unit) -> list[Param]:
    """Parameters that get gradients: in a mixed unit of FSDP1 all, as views of one flat parameter that trains."""
    every = plan.backend is Backend.FSDP1 and unit.sharded and unit.kind == "mixed"
    return [p for p in unit.params if p.trainable or (every and _floats(p))]


def _floats(p: Param) -> bool:
    return p.dtype.startswith(("float", "bfloat"))


def _vocabulary(twin: nn.Module) -> int:
    """Width of the logits, to tell them from other activations; 0 where there are none."""
    for module in twin.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "get_text_config"):
            return int(getattr(config.get_text_config(), "vocab_size", 0))
    return 0


def _loss(out: Any) -> torch.Tensor | None:
    """The model's own loss as a training step takes it, else the sum of what it gives."""
    loss = getattr(out, "loss", None)
    if loss is None:
        given = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        return sum((t.sum() for t in given), start=torch.zeros(())) if given else None
    return loss.float() * torch.ones(()) if loss.requires_grad else None


class _Film(FakeOperators):
    """Counts storages as they come and go, and takes note at the moments that matter to a wrapper."""

    def __init__(self, mode: FakeTensorMode, plan: WrapPlan, twin: nn.Module, vocabulary: int):
        super().__init__(mode)
        self.plan, self.vocabulary = plan, vocabulary
        self.moments: list[Moment] = []
        self.known: set[int] = set()
        self._refs: dict[int, weakref.ref] = {}
        self._work: dict[tuple[Kind, int], int] = {}
        self.live = self.peak = self.bare = self.grads = self.logits = self.logits_then = 0
        self.random = 0
        self._units = [u for u in plan.units if u.sharded or plan.backend is Backend.DDP]
        self._missing: dict[int, set[str]] = {}
        self._entered: list[Unit] = []
        self._after: set[int] = set()
        self._backing: set[int] = set()
        self._params = {u.order: [twin.get_parameter(p.name) for p in _graded(plan, u)] for u in plan.units}
        self._waiting: dict[int, int] = {}
        self.idle = {p.name for p in plan.params if p.trainable}
        self._spared: set[int] = set()
        self.twice: set[int] = set()
        for unit in plan.units:
            self._watch(unit, twin)

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Kind]:
        """Runs it, and counts what it makes."""
        out, kind = super().run(func, args, kwargs)
        if made := sum([self._note_storage(t) for t in tensors_of(out)]):
            if made not in kind.notes:
                kind.notes[made] = operator_of(func, args, kwargs, out, made)
            self._work[kind, made] = self._work.get((kind, made), 0) + 1
        return out, kind

    def work(self) -> tuple[int, int, int, tuple[Operator, ...]]:
        """Operations, bytes moved, calls, and what made them up."""
        counted: Counter[Operator] = Counter()
        for (kind, made), calls in self._work.items():
            counted[kind.notes[made]] += calls
        flops, moved = (sum(getattr(op, name) * calls for op, calls in counted.items()) for name in ("flops", "moved"))
        return flops, moved, counted.total(), tuple(op._replace(calls=calls) for op, calls in counted.items())

    def _note_storage(self, t: torch.Tensor) -> int:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return 0
        nbytes = storage.nbytes()
        logits = nbytes if self.vocabulary and t.ndim > 1 and t.shape[-1] == self.vocabulary else 0
        self.known.add(key)
        self._refs[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes, logits))
        self.live += nbytes
        self.logits += logits
        self.bare = max(self.bare, self.live - self.grads)
        if self.live > self.peak:
            self.peak, self.logits_then = self.live, self.logits
        return nbytes

    def _gone(self, key: int, nbytes: int, logits: int) -> None:
        del self._refs[key]
        self.known.discard(key)
        self.live -= nbytes
        self.logits -= logits

    def note(self, event: str, unit: int) -> None:
        """Something happens now: what lived until it, and what lives."""
        held = self.peak, self.bare, self.live, self.grads, self.logits_then, self.random
        self.moments.append(Moment(event, unit, *held))
        self._restart()

    def _restart(self) -> None:
        self.peak, self.bare, self.logits_then = self.live, self.live - self.grads, self.logits

    def keep_random(self, nbytes: int) -> None:
        """So many more bytes are states of random numbers."""
        self.random += nbytes

    def end(self) -> None:
        """Backward is over: units whose inputs needed no gradient are reduced now."""
        for unit in self._entered:
            self._reduce(unit)
        self.note("end", 0)

    def _watch(self, unit: Unit, twin: nn.Module) -> None:
        ddp = self.plan.backend is Backend.DDP
        dtype = getattr(torch, unit.compute_dtype) if unit.compute_dtype and not ddp else None
        if not unit.sharded and not self.plan.fsdp.mixed_precision:
            dtype = None
        for name in unit.modules:
            module = twin.get_submodule(name)
            module.register_forward_pre_hook(self._enter(unit, name, dtype), with_kwargs=True, prepend=True)
            if unit in self._units:
                module.register_forward_hook(self._leave(unit, name))
        for p in _graded(self.plan, unit):
            twin.get_parameter(p.name).register_post_accumulate_grad_hook(self._accumulated(unit, p.name))

    def _enter(self, unit: Unit, name: str, dtype: torch.dtype | None) -> Callable:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            begins = unit in self._units and unit.order not in self._missing
            if begins:
                self._missing[unit.order] = set(unit.modules)
                self.note("enter", unit.order)
                if unit not in self._entered:
                    self._entered.append(unit)
                self._waiting[unit.order] = len(self._params[unit.order])
            if dtype is not None:
                args, kwargs = tree_map(lambda v: _cast(v, dtype), (args, kwargs))
            if begins and torch.is_grad_enabled():
                args, kwargs = self._before_inputs(unit, args, kwargs)
            return args, kwargs

        return hook

    def _before_inputs(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Have what comes after the unit's backward noted."""
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not places:
            return args, kwargs
        if self.plan.backend is Backend.FSDP1:  # frees what is frozen when each input has its gradient: late, if one
            # goes into later units, too, as Flamingo's media do. What trains it reduces with the last of its gradients.
            register_multi_grad_hook([leaves[i] for i in places], lambda _: self._frozen_done(unit))
            return args, kwargs
        passed = _After.apply(lambda: self._reduce(unit), *[leaves[i] for i in places])
        for i, t in zip(places, passed, strict=True):
            leaves[i] = t
        return torch.utils._pytree.tree_unflatten(leaves, spec)

    def _leave(self, unit: Unit, name: str) -> Callable:
        def hook(_: nn.Module, __: Any, out: Any) -> None:
            missing = self._missing.get(unit.order, set())
            missing.discard(name)
            if name and missing:
                return
            for other in [u for u in self._units if u.order in self._missing] if not name else [unit]:
                del self._missing[other.order]
                self.note("leave", other.order)
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.requires_grad:
                    t.register_hook(lambda grad: self._backward(unit))

        return hook

    def _backward(self, unit: Unit) -> None:
        if unit.order not in self._backing:
            self._backing.add(unit.order)
            self._after.discard(unit.order)
            self.note("back", unit.order)

    def _frozen_done(self, unit: Unit) -> None:
        if not self._params[unit.order]:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        if unit.order in self._after:
            return
        self._after.add(unit.order)
        self._backing.discard(unit.order)
        params = self._params[unit.order]
        spared = bool(params) and unit.sharded and all(p.grad is None for p in params)
        if spared:
            self._spared.add(unit.order)
        elif unit.order in self._spared:
            self.twice.add(unit.order)
        one = self.plan.backend is Backend.FSDP1 and not spared  # flat gradient, with zeros for what has none
        zeros = sum(p.untyped_storage().nbytes() for p in params if p.grad is None) if one else 0
        self.live += zeros
        self.note("spared" if spared else "after", unit.order)
        self.live -= zeros
        self._free(params)
        self._restart()

    def _accumulated(self, unit: Unit, name: str) -> Callable:
        def hook(p: torch.Tensor) -> None:
            assert p.grad is not None
            self.idle.discard(name)
            self.grads += p.grad.untyped_storage().nbytes()
            self.bare = max(self.bare, self.live - self.grads)
            self._waiting[unit.order] = self._waiting.get(unit.order, 0) - 1
            if not unit.sharded:  # DDP moves it into a bucket that is always there
                self._free([p])
            elif self.plan.backend is Backend.FSDP1 and not self._waiting[unit.order]:
                self._reduce(unit)

        return hook

    def _free(self, params: Sequence[torch.Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                self.grads -= p.grad.untyped_storage().nbytes()
                p.grad = None


class _Repetition(nullcontext):
    """What checkpointing enters to run forward again; as long as it may, it keeps the state of random numbers."""

    def __init__(self, film: _Film):
        super().__init__()
        nbytes = torch.get_rng_state().nbytes
        film.keep_random(nbytes)
        weakref.finalize(self, film.keep_random, -nbytes)


class _After(torch.autograd.Function):
    """Passes tensors through; calls back once the gradients of all have been computed."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.call()
        return None, *grads


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value
