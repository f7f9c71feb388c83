"""The peak of a training step: the plan's moments played through, with what its wrapper allocates at each.

As torch's wrappers do. FSDP2 gathers into a flat buffer and copies out of it, keeps that buffer until the next unit's
is copied out (in forward), and the input of one reduction until the next; on CPUs also what that receives. FSDP1
gathers in place and makes one flat gradient of a unit's. DDP has all gradients in buckets, always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..params import Backend, BackwardPrefetch
from ..plan import ITEMSIZE, Unit, WrapPlan
from ..plan.cost import ahead_in_forward, cast_bytes, gradient_bytes, whole_gradients

_HELD = ("parameters", "module_buffers", "optimizer", "gathered", "gradients", "buffers", "activations")


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds in a step, and what that is made of; bytes."""

    when: str
    """forward of, backward of, or reduction of a unit."""
    parameters: int
    """At rest."""
    module_buffers: int
    """The model's own buffers."""
    optimizer: int
    gradients: int
    """Reduced ones, and whole ones that wait for the last micro-step."""
    gathered: int = 0
    """Units gathered then."""
    buffers: int = 0
    """What gathers and reductions pass through."""
    activations: int = 0
    """With the batch, and gradients of the unit at work."""
    logits: int = 0
    """Of these, what is as wide as the vocabulary: logits, their copies and gradients."""

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(getattr(self, name) for name in _HELD)


def peak_of(
    plan: WrapPlan, fixed: Peak, *, micro_steps: int = 1, gloo: bool = False, offload: bool = False
) -> tuple[Peak, int]:
    """The peak of a step whose optimizer states are there already, and what is held when its first forward is over.

    fixed: what is held all the time. gloo: ranks on CPUs, where collectives pass through buffers of their own.
    offload: shards and their gradients lie with the host, and are copied to the device to be gathered.
    """
    play = _PLAYS[plan.backend](plan, fixed, gloo, offload)
    for i in sorted({0, min(1, micro_steps - 1), micro_steps - 1}):  # those between are alike
        play.micro_step(first=i == 0, last=i == micro_steps - 1)
    return play.worst, play.turn


class _Play:
    """What a rank holds while the moments of its micro-steps pass."""

    anew = False
    """Each backward makes gradients of its own, to be added to those of earlier ones."""

    def __init__(self, plan: WrapPlan, fixed: Peak, gloo: bool, offload: bool):
        self.plan, self.fixed, self.gloo, self.offload = plan, fixed, gloo, offload
        self.worst, self.most, self.base = fixed, fixed.bytes, fixed.bytes
        self.turn = 0
        """What is held when forward is over."""
        self.units = {u.order: u for u in plan.units if u.params and (u.sharded or plan.backend is Backend.DDP)}
        self.gathered: dict[int, int] = {}
        self.flat: dict[int, int] = {}
        """Gathers that wait to be copied out."""
        self.kept = self.reducing = self.reduced = 0
        """The flat buffer of the last unit copied out; the last reduction's input; gradients reduced so far."""
        self.whole: dict[int, int] = {}
        """Gradients that wait for the last micro-step."""
        self.late: Unit | None = None
        """One whose backward is over, and whose gradients have yet to be reduced."""
        self.done: set[int] = set()
        """Units whose gradients have been reduced."""
        self.held = 0
        """Bytes in `gathered`."""
        self.random = 0
        """Bytes of random numbers' states, where they are counted."""
        self.forward, self.at = True, 0
        self.order: dict[int, int | None] = {}
        """Units whose forward is over, each with the one before it."""
        self.newest: int | None = None
        self.ahead = ahead_in_forward(plan.units, plan.fsdp)

    def micro_step(self, *, first: bool, last: bool) -> None:
        """All moments once. first: no gradients are there yet. last: they are reduced."""
        self.first, self.last, self.forward, self.order, self.newest = first, last, True, {}, None
        running: list[int] = []
        for moment in self.plan.moments:
            unit = self.units.get(moment.unit)
            self.at = running[-1] if running else 0
            new = first or not self.whole or self.anew
            before, self.random = self.random, moment.random if self.gloo else 0
            lived = max(before, self.random) + (moment.peak if new else moment.bare)
            if self.forward and moment.event in ("back", "after", "end"):
                self.forward = False
                self.turn = self.turn or self.base + self.held + lived
            self.see(lived, logits=moment.logits)
            live = self.random + (moment.live if new else moment.live - moment.grads)
            self.at = moment.unit
            if unit or moment.unit == 0:
                getattr(self, moment.event)(unit, live)
            if moment.event in ("enter", "back"):
                running.append(moment.unit)
            elif moment.unit in running:
                running.remove(moment.unit)

    def see(self, activations: int, *, logits: int = 0, passing: int = 0) -> None:
        """Compare what is held now, with so many activations and so much that only passes, to the most so far."""
        gradients = self.reduced + sum(self.whole.values()) + (_flat(self.late) if self.late else 0)
        buffers = self.kept + self.reducing + sum(self.flat.values()) + passing
        now = self.base + self.held + gradients + buffers + activations
        if now > self.most:
            self.most = now
            self.worst = replace(
                self.fixed,
                when=f"{'forward' if self.forward else 'backward'} of {self.plan.units[self.at].name}",
                gathered=self.held,
                gradients=self.fixed.gradients + gradients,
                buffers=buffers,
                activations=activations,
                logits=logits,
            )

    def _take(self, unit: Unit) -> None:
        self.gathered[unit.order] = unit.gathered_bytes
        self.held += unit.gathered_bytes

    def _drop(self, order: int) -> None:
        self.held -= self.gathered.pop(order, 0)

    def _let_go(self) -> None:
        """Backward is over: only what is held over micro-steps stays gathered."""
        for order in [i for i in self.gathered if self.last or not self.units[i].hold]:
            self._drop(order)

    def _left(self, unit: Unit) -> None:
        """A unit's forward is over."""
        self.order.setdefault(unit.order, self.newest)
        self.newest = unit.order

    def _soon(self, unit: Unit | None, live: int) -> None:
        """Gather what forward comes to later."""
        for order in self.ahead.get(unit.order if unit else 0, ()) if self.forward else ():
            after = self.units[order]
            if not after.reshard_after_forward or (unit and unit.gathered_bytes):  # else AUTO has yet to choose for it
                self._gather(after, live)

    def _ahead(self, unit: Unit, live: int) -> None:
        """Gather what backward comes to next, unless it never does."""
        place = self.order.get(unit.order)
        if unit.gathered_bytes and place is not None and (ahead := self.units[place]).grad_flow:
            self._gather(ahead, live)  # one that AUTO has not chosen for yet has no bytes, and may be no unit

    def _passing(self, unit: Unit) -> int:
        """What a rank's part becomes on its way into a gather: a copy of the host's, and in the format of compute."""
        return unit.held_bytes * self.offload + cast_bytes(self.plan, unit)

    def enter(self, unit: Unit | None, live: int) -> None:
        """A unit's forward begins."""

    def leave(self, unit: Unit | None, live: int) -> None:
        """It is over."""

    def back(self, unit: Unit | None, live: int) -> None:
        """The gradient of what it gave is there."""

    def after(self, unit: Unit | None, live: int) -> None:
        """The gradients of its parameters and of what it was given are there."""

    def spared(self, unit: Unit | None, live: int) -> None:
        """What it was given has its gradient; those of its parameters come with an earlier run's, or never."""

    def end(self, unit: Unit | None, live: int) -> None:
        """Backward is over."""

    def _gather(self, unit: Unit, live: int) -> None:
        """Have a unit's weights on their way, if they are not here."""


class _Fsdp2(_Play):
    def enter(self, unit: Unit | None, live: int) -> None:
        if unit is not None:
            self._gather(unit, live)
            self._copy_out(unit, live)
        self._soon(unit, live)

    def leave(self, unit: Unit | None, live: int) -> None:
        if not self.forward:  # recomputed: it stays for its backward
            return
        if unit is None:
            self.kept = 0
            return
        self._left(unit)
        if unit.reshard_after_forward and (self.last or not unit.hold):
            self._drop(unit.order)
        if unit.order == 0:
            self.kept = 0

    def back(self, unit: Unit | None, live: int) -> None:
        if unit is None:
            return
        if unit.grad_flow:
            self._gather(unit, live)
            self._copy_out(unit, live)
        if self.plan.fsdp.backward_prefetch is not BackwardPrefetch.NO_PREFETCH:
            self._ahead(unit, live)

    def after(self, unit: Unit | None, live: int) -> None:
        self.spared(unit, live, new=True)

    def spared(self, unit: Unit | None, live: int, *, new: bool = False) -> None:
        if unit is None:
            return
        if self.last or not unit.hold:
            self._drop(unit.order)
        if unit.kind == "frozen" or not (new or unit.order in self.whole):
            return
        if not self.last:  # accumulated in the format of reduction
            self.whole[unit.order] = unit.reduced_bytes
            return
        mine = self.whole.pop(unit.order, 0)
        self.reducing = unit.reduced_bytes
        self.see(live, passing=mine)
        left = live if mine else live - whole_gradients(unit)
        if unit.order not in self.done:
            self.reduced += 0 if self.offload else gradient_bytes(self.plan, unit)
        self.done.add(unit.order)
        # By parts, see wrap.gloo: of two ranks neither sends itself its own. One rank alone copies.
        by_parts = self.gloo and self.plan.shard > 1
        if by_parts:
            self.reducing += unit.reduced_bytes // 2 if self.plan.shard == 2 else unit.reduced_bytes
        self.see(left)
        if by_parts and not self._ends_later(unit):
            self.reducing = 0

    def _ends_later(self, unit: Unit) -> bool:
        """Its reduction ends with the next one: nothing is left to be done with the outcome."""
        dtype = self.plan.fsdp.reduce_dtype.torch_name
        return (
            self.plan.replicate == 1 and dtype != "float16" and {p.dtype for p in unit.params if p.trainable} == {dtype}
        )

    def end(self, unit: Unit | None, live: int) -> None:
        self.reducing = self.kept = 0
        self.flat.clear()
        self._let_go()

    def _gather(self, unit: Unit, live: int) -> None:
        if unit.order in self.gathered or unit.order in self.flat:
            return
        self.flat[unit.order] = unit.gathered_bytes if self.plan.shard > 1 else 0
        self.see(live, passing=self._passing(unit))

    def _copy_out(self, unit: Unit, live: int) -> None:
        if unit.order in self.gathered:
            return
        flat = self.flat[unit.order]
        self.kept = 0
        self._take(unit)
        self.see(live)
        del self.flat[unit.order]
        self.kept = flat if self.forward and not self.gloo else 0  # there a gather is waited for, and let go of at once


class _Fsdp1(_Play):
    anew = True

    def enter(self, unit: Unit | None, live: int) -> None:
        if unit is None:
            return
        self._gather(unit, live)
        self._soon(unit, live)

    def leave(self, unit: Unit | None, live: int) -> None:
        if unit is None:
            return
        if self.forward:
            self._left(unit)
        if unit.reshard_after_forward:
            self._drop(unit.order)

    def back(self, unit: Unit | None, live: int) -> None:
        if unit is not None:
            self._gather(unit, live)
            if self.plan.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                self._ahead(unit, live)

    def after(self, unit: Unit | None, live: int) -> None:
        if unit is None:
            return
        self._finish(live)
        if unit.kind == "frozen":
            self._free(unit)
        elif any(self.units[i].grad_flow for i, ahead in self.ahead.items() if unit.order in ahead and i in self.units):
            self.late = unit  # its views are older than what the unit before computes: backward comes to them later
        else:
            self._reduce(unit, live)

    def _finish(self, live: int) -> None:
        """Reduce what waited for the unit before it."""
        late, self.late = self.late, None
        if late is not None:
            self._reduce(late, live + _flat(late))

    def _reduce(self, unit: Unit, live: int) -> None:
        flat, mine = _flat(unit), self.whole.pop(unit.order, 0)
        self.see(live, passing=mine + flat)  # made of the gradients of its parts
        left = live - flat
        if not self.last:
            self.whole[unit.order] = flat
            self.see(left, passing=flat if mine else 0)
            self._free(unit)
            return
        self._free(unit)
        if self.plan.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._ahead(unit, left + flat)
        dtypes = {unit.compute_dtype or p.dtype for p in unit.params}
        cast = 0 if dtypes == {self.plan.fsdp.reduce_dtype.torch_name} else unit.reduced_bytes
        self.reduced += 0 if self.offload else gradient_bytes(self.plan, unit)
        # Views of the gradient that was accumulated stay with the original parameters to the end of the reduction.
        self.see(left, passing=mine + flat + cast + unit.reduced_bytes * self.gloo)

    def spared(self, unit: Unit | None, live: int) -> None:
        if unit is not None:
            self._free(unit)

    def end(self, unit: Unit | None, live: int) -> None:
        self._finish(live)
        self._let_go()

    def _gather(self, unit: Unit, live: int) -> None:
        if unit.order in self.gathered:
            return
        self._take(unit)
        self.see(live, passing=self._passing(unit) + unit.gathered_bytes * self.gloo)

    def _free(self, unit: Unit) -> None:
        if self.last or not unit.hold:
            self._drop(unit.order)


def _flat(unit: Unit) -> int:
    """FSDP1: bytes of all gradients of a unit, in parts or as one; zeros stand for those of what is frozen."""
    return sum(p.numel * ITEMSIZE[unit.compute_dtype or p.dtype] for p in unit.params)


class _Ddp(_Play):
    """Whole gradients are in buckets, which count as `fixed`; those of earlier micro-steps beside them."""

    def after(self, unit: Unit | None, live: int) -> None:
        if unit is not None:
            self.whole[unit.order] = 0 if self.last else unit.reduced_bytes


_PLAYS = {Backend.FSDP2: _Fsdp2, Backend.FSDP1: _Fsdp1, Backend.DDP: _Ddp}
