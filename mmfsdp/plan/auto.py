"""FrozenPolicy.AUTO: for each frozen unit the policy with which a step sends least, within a budget of memory.

A unit with grad flow saves two gathers when it is replicated and one when it is kept, for about the same memory; one
without saves only one. Branch and bound, the largest units first: a mix of which some are chosen holds at least what it
holds if the others were shards that take no room gathered, and sends at least what a Lagrangian bound says (Fisher
1981). Where an example's activations are known, what a mix holds is the peak of its step. Exact up to `EXACT` units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, gcd

from ..params import FrozenPolicy, ParamError, TrainParams
from .table import sent, size
from .units import Moment, Unit, WrapPlan

EXACT = 16
"""So few units to choose for are searched to the end."""
WORK = 60_000
"""Beyond, units looked at, and a mix is good enough that sends at most `NEAR` of the bound."""
NEAR = 1.002
LATENCY_BYTES = 256 * 1024
"""What could be sent in the time that a collective takes to begin (30 microseconds at 9 GB/s)."""

Held = tuple[int, int]
"""Bytes that a rank holds: at most, and when forward is over."""


def choose(
    plans: Sequence[WrapPlan], *, budget: int, moments: Sequence[Moment] = (), train: TrainParams | None = None
) -> WrapPlan:
    """The best mix of plans that differ only in what they do with frozen units, one each for SHARD, KEEP, REPLICATE.

    budget: bytes that a rank may hold. moments: of such a plan's example, for the peak to count; without, all but
    activations is added up. train: of what steps. Raises ParamError if even the least does not fit.
    """
    train = train or TrainParams()
    search = _Search([replace(p, moments=tuple(moments)) for p in plans], budget, train)
    units = search.best()
    held = search.held(units)[0]
    if held > budget:
        raise ParamError(
            "memory_budget_gib",
            f"{budget / 2**30:.3g} is {size(held - budget)} too little: the least that a rank can hold is "
            f"{size(held)} (with {_words(units)}{'' if moments else '; activations apart'}); set it to "
            f"{held / 2**30 + 5e-4:.3f}, shard over more ranks, or lower frozen_dtype",
        )
    most, least = (sum(map(search.sent, mix)) for mix in (plans[0].units, units))
    why = (
        f"AUTO: {_words(units)}; a rank holds {size(held)} of {size(budget)}{' at most' if moments else ''} and sends "
        f"{size(least)} a step, with all SHARD {size(most)}"
    )
    return replace(plans[0], units=units, why=why)


def held_by(plan: WrapPlan, train: TrainParams | None = None) -> Held:
    """What a rank holds in a step; activations apart in a plan that has no moments."""
    from ..estimate.cost import held  # which reads plans

    return held(plan, train)


class _Search:
    """Among the mixes, for the one that sends least and fits."""

    def __init__(self, plans: Sequence[WrapPlan], budget: int, train: TrainParams) -> None:
        self.base, self.budget, self.train = plans[0], budget, train
        self.alike = [p.units for p in plans]
        self.options = [self._options(units) for units in zip(*self.alike, strict=True)]
        several = [i for i, options in enumerate(self.options) if len(options) > 1]
        self.order = sorted(several, key=lambda i: -self.options[i][0].gathered_bytes)
        self.least = tuple(self._least(o) if len(o) > 1 else o[0] for o in self.options)
        self.step = gcd(*(self.sent(o) for i in self.order for o in self.options[i])) or 1
        self.fixed = sum(self.sent(u) for i, u in enumerate(self.least) if i not in self.order)
        self.root, self.exact = self.held(self.least), len(several) <= EXACT
        self.prices = [self._price(which) for which in (0, 1)]

    def sent(self, unit: Unit) -> int:
        """Bytes that a rank sends for it in a step."""
        return sent(self.base, unit, self.train.accumulation)

    def held(self, units: tuple[Unit, ...]) -> Held:
        """What a rank holds with these units."""
        return held_by(replace(self.base, units=units), self.train)

    def best(self) -> tuple[Unit, ...]:
        """The units; those with which least is held, where nothing fits."""
        best = self._walk(self._wire_bound, self._near())
        if best is None:
            least = min(self.alike, key=lambda units: self.held(units)[0])
            best = self._walk(lambda place, held, wire: held[0], (self.held(least)[0], least))
        assert best
        return best[1]

    def _options(self, alike: Sequence[Unit]) -> list[Unit]:
        """What differs of a unit's policies."""
        found: dict[tuple, Unit] = {}
        for u in alike:
            hold = u.hold and self.train.accumulation > 1
            look = u.sharded, u.reshard_after_forward, u.gathers_backward, u.held_bytes, hold
            found.setdefault(look, u)
        return list(found.values())

    def _rest(self, unit: Unit) -> int:
        """Bytes that a rank holds of it all the time, where they count."""
        away = unit.sharded and self.base.fsdp.cpu_offload and self.base.moments
        return 0 if away else unit.held_bytes

    def _least(self, options: Sequence[Unit]) -> Unit:
        """What takes no more room at any time than any of the options."""
        return replace(options[0], held_bytes=min(map(self._rest, options)), gathered_bytes=0)

    def _adds(self, i: int, unit: Unit) -> Held:
        """What a unit's policy holds beyond that, at least: always, and when forward is over."""
        rest = self._rest(unit) - self.least[i].held_bytes
        stays = unit.sharded and not unit.reshard_after_forward and bool(unit.params)
        if not self.base.moments:
            return (rest + stays * unit.gathered_bytes,) * 2
        runs = any(m.event == "enter" and m.unit == unit.order for m in self.base.moments)
        return rest, rest + (stays and runs) * unit.gathered_bytes

    def _price(self, which: int) -> tuple[float, list[float]]:
        """The price of a byte held at which the bound is highest, and the least that the units from each place on in
        the order send and hold at that price."""
        items = [[(self.sent(o), self._adds(i, o)[which]) for o in self.options[i]] for i in self.order]
        room = self.budget - self.root[which]

        def sums(price: float) -> list[float]:
            each = [min(wire + price * more for wire, more in item) for item in items]
            return [*accumulate(reversed(each), initial=0.0)][::-1]

        low, high = 0.0, max((wire for item in items for wire, _ in item), default=0) + 1.0
        for _ in range(100):  # concave in the price
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (a, high) if sums(a)[0] - a * room < sums(b)[0] - b * room else (low, b)
        return low, sums(low)

    def _wire_bound(self, place: int, held: Held, wire: float) -> float:
        """What is sent at least, once the units before that place are chosen; infinite where they do not fit."""
        if held[0] > self.budget:
            return float("inf")
        more = max(sums[place] - price * (self.budget - h) for (price, sums), h in zip(self.prices, held, strict=True))
        return self.fixed + wire + max(0, ceil(more / self.step - 1e-3) * self.step)

    def _walk(
        self, bound: Callable[[int, Held, float], float], best: tuple[float, tuple[Unit, ...]] | None
    ) -> tuple[float, tuple[Unit, ...]] | None:
        """The mix of which the bound is least, with that; None where there is none below infinity, or below `best`."""
        enough, left = bound(0, self.root, 0) * NEAR, WORK
        stack = [(0, self.least, self.root, 0)]
        while stack and (self.exact or (left > 0 and not (best and best[0] <= enough))):
            place, units, held, wire = stack.pop()
            most = best[0] if best else float("inf")
            if bound(place, held, wire) >= most:  # by what was added to the mix before
                continue
            left -= len(units)
            held = self.held(units)
            if bound(place, held, wire) >= most:
                continue
            if place == len(self.order):
                best = bound(place, held, wire), units
                continue
            i = self.order[place]
            for option in sorted(self.options[i], key=lambda o: -self._worth(i, o, self.prices[1][0])):
                more = self._adds(i, option)
                mix = (*units[:i], option, *units[i + 1 :])
                stack.append((place + 1, mix, (held[0] + more[0], held[1] + more[1]), wire + self.sent(option)))
        return best

    def _worth(self, i: int, unit: Unit, price: float, which: int = 1) -> float:
        return self.sent(unit) + price * self._adds(i, unit)[which]

    def _near(self) -> tuple[float, tuple[Unit, ...]] | None:
        """Of many units a mix that fits, with what it sends: the best of each at the price at which these do, and what
        else there is room for."""
        fit = [units for units in self.alike if self.held(units)[0] <= self.budget]
        if self.exact or not fit:
            return None
        filled = [self._filled(units, which) for which in (0, 1) for units in (fit[0], self._at_price(fit[0], which))]
        return min(((sum(map(self.sent, units)), units) for units in filled), key=lambda found: found[0])

    def _at_price(self, units: tuple[Unit, ...], which: int) -> tuple[Unit, ...]:
        low, high = 0.0, 2 * self.prices[which][0] + 1.0
        for _ in range(24):
            price = (low + high) / 2
            mix = list(self.least)
            for i in self.order:
                mix[i] = min(self.options[i], key=lambda o: self._worth(i, o, price, which))
            if self.held(tuple(mix))[0] <= self.budget:
                units, high = tuple(mix), price
            else:
                low = price
        return units

    def _filled(self, units: tuple[Unit, ...], which: int) -> tuple[Unit, ...]:
        """With what saves most for a byte, as long as it fits."""

        def rate(i: int, option: Unit) -> float:
            dearest = max(map(self.sent, self.options[i]))
            return (dearest - self.sent(option)) / (1 + self._adds(i, option)[which])

        left, turn = WORK // len(units), self.held(units)[1]
        pairs = [(i, option) for i in self.order for option in self.options[i]]
        for i, option in sorted(pairs, key=lambda pair: -rate(*pair)):
            more = self._adds(i, option)[1] - self._adds(i, units[i])[1]
            if self.sent(option) >= self.sent(units[i]) or turn + more > self.budget or not left:
                continue
            mix, left = (*units[:i], option, *units[i + 1 :]), left - 1
            if (now := self.held(mix))[0] <= self.budget:
                units, turn = mix, now[1]
        return units


def ddp_is_as_good(plan: WrapPlan, train: TrainParams | None = None) -> bool:
    """True where nothing frozen moves any more, and DDP's fewer collectives outweigh the bytes it sends more."""
    moved = [u for u in plan.units if u.sharded and u.params]
    if plan.replicate > 1 or any(u.kind != "trainable" for u in moved):
        return False
    steps = (train or TrainParams()).accumulation
    calls = sum(u.gathers_forward + u.gathers_backward + 1 for u in moved)
    ddp = 2 * sum(p.numel * 4 for u in moved for p in u.params) * (plan.world_size - 1) // plan.world_size
    return ddp - sum(sent(plan, u, steps) for u in moved) < LATENCY_BYTES * (calls - 1)


def _words(units: tuple[Unit, ...]) -> str:
    """How many frozen units, and of which kind, got which policy."""
    parts = []
    for policy in reversed(FrozenPolicy):
        chosen = [u for u in units if u.frozen_policy is policy]
        flow = sum(u.grad_flow for u in chosen)
        if chosen:
            parts.append(f"{policy} {len(chosen)} ({flow} with grad flow)")
    return ", ".join(parts) + " frozen units" if parts else "nothing frozen to choose for"
