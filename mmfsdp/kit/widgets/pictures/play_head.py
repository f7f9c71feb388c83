"""The play head of a step: what each unit does at each event, drawn over the ranks, and said in a sentence.

Everything that is ever shown is drawn once, with the stops at which it is: a page's script only shows and hides it.
Where no script runs, the head stands where a rank holds most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from ....core.plan import WrapPlan
from ....params.in_words import size
from ....predict.timeline import Timeline
from ..style import FILL
from .rank_picture import LEFT, Lanes, stripe_of
from .unit_boxes import short_text

Span = tuple[int, int]
"""First and last stop."""
LOOKS = ("gathered", "whole", "own")
"""Gathered units, whole gradients, and the part of them that a rank owns."""
WORDS = {
    "F": ("begins the forward of {}", "begins its forward"),
    "f": ("ends the forward of {}", "ends its forward"),
    "B": ("begins the backward of {}", "begins its backward"),
    "b": ("ends the backward of {}", "ends its backward"),
    "n": ("ends the backward of {}, which has no gradient", "ends its backward, without a gradient"),
    "s": ("skips the backward of {}", "skips its backward"),
    "e": ("ends the backward of the model", "ends the backward of the model"),
    "g": ("gathers {}", "gathers it"),
    "w": ("keeps the gradients of {} for the next micro-step", "keeps its gradients for the next micro-step"),
    "o": ("sends the gradients of {} to their owners", "sends its gradients to their owners"),
    "a": ("sums the gradients of {} with all ranks", "sums its gradients with all ranks"),
    "x": ("frees {}", "frees it"),
}
"""Actions of a rank at an event, by a letter: with the names of the units, and with the one that was named before."""
HELD = "m"
"""The letter of what a rank holds."""
FRAME = "Each rank {}, and holds {}."
"""Of a sentence: its actions, and the bytes that it holds."""
LETTERS = {"pre_forward": "F", "post_forward": "f", "pre_backward": "B", "post_backward": "b"}
LETTERS |= {"no_gradient": "n", "end": "e"}
"""Kind of an event -> its letter."""
MAX_STOPS = 300
"""Of a step with more events, several are one stop of the head, and units are named by their boxes."""
MAX_NAMES = 2
"""Of more units that a rank does the same with, it is said how many they are."""
MIN_SLICE = 8.0
"""Pixels: of a box of more units than it has room for, several share a slice."""
GRIP = 5
"""Pixels from the line of the head to the side of what a mouse takes hold of."""


class PlayHead:
    """A step, stop by stop: what happens, which units are gathered, and where gradients are.

    A stop is an event; of a long step it is several.
    """

    def __init__(self, plan: WrapPlan, timeline: Timeline, lanes: Lanes) -> None:
        self._plan, self._lanes, self._events = plan, lanes, timeline.events
        stops = min(timeline.events, MAX_STOPS)
        self.happens: list[dict[str, list[int]]] = [defaultdict(list) for _ in range(stops)]
        """Of each stop the orders of units by the letter of what a rank does with them."""
        self._shown: dict[str, dict[int, list[Span]]] = {look: defaultdict(list) for look in LOOKS}
        """Look -> order of a unit -> when it is seen."""
        self.held: list[str]
        """The most that a rank holds at each stop, without activations, in words."""
        most = max(timeline.moments, key=lambda moment: moment.without_activations)
        self.fullest = self.stop_of(most.event)
        """The stop at which most is held."""
        self._read_moments(timeline)
        self._read_spans(timeline)
        self._read_reductions(timeline)
        self._names = self._names_of_units()

    def stop_of(self, event: int) -> int:
        """Return the stop that an event is part of."""
        return event * len(self.happens) // self._events

    def _read_moments(self, timeline: Timeline) -> None:
        most = [0] * len(self.happens)
        in_backward: set[int] = set()
        for event, moments in groupby(timeline.moments, key=lambda moment: moment.event):
            first, *more = moments
            stop, letter = self.stop_of(event), LETTERS[first.kind]
            if first.kind == "pre_backward":
                in_backward.add(first.unit)
            elif first.kind == "post_backward" and first.unit not in in_backward:
                letter = "s"  # of a unit that needs no backward, the wrapper ends it all the same
            elif first.kind == "end":
                in_backward.clear()
            self.happens[stop][letter].append(first.unit)
            most[stop] = max(most[stop], *(moment.without_activations for moment in (first, *more)))
        self.held = [size(timeline.constant + held) for held in most]

    def _read_spans(self, timeline: Timeline) -> None:
        moments, end = timeline.moments, len(self.happens) - 1
        spans = list(timeline.gathered_spans)
        spans += [(order, first, len(moments) - 1) for order, first in timeline.gathered_to_the_end]
        for order, first, last in spans:
            if self._plan.units[order].numel:  # a root without parameters has nothing to gather
                span = self.stop_of(moments[first].event), self.stop_of(moments[last].event)
                self._shown["gathered"][order].append(span)
                self.happens[span[0]]["g"].append(order)
                if span[1] < end:
                    self.happens[span[1]]["x"].append(order)
        for order, first, last in timeline.whole_gradient_spans:
            span = self.stop_of(moments[first].event), self.stop_of(moments[last].event)
            self._shown["whole"][order].append(span)
            self.happens[span[0]]["w"].append(order)

    def _read_reductions(self, timeline: Timeline) -> None:
        """Read when gradients are reduced: whole ones are on the way, then each rank has its part, or the sum."""
        end = len(self.happens) - 1
        for collective in timeline.collectives:
            order, stop = collective.unit, self.stop_of(timeline.event_of(collective))
            is_sharded = self._plan.units[order].sharded
            reduced = self.happens[stop]["o" if is_sharded else "a"]
            if collective.kind == "all-gather" or order in reduced:
                continue  # an all-reduce over replicas follows a reduce-scatter
            reduced.append(order)
            self._shown["whole"][order].append((stop, stop if is_sharded else end))
            if is_sharded and stop < end:
                self._shown["own"][order].append((stop + 1, end))

    def _names_of_units(self) -> dict[int, str]:
        """Return what the sentences call units, by their order."""
        names = {unit.order: short_text(unit.name) for unit in self._plan.units}
        if len(self.happens) < self._events:
            for box in self._lanes.boxes:
                if len(box.units) > 1:
                    name = f"one of {len(box.units)} like {short_text(box.unit.name)}"
                    names |= dict.fromkeys([unit.order for unit in box.units], name)
        return names

    def _done(self, stop: int) -> dict[str, list[str]]:
        """Return the names of units by the letter of what a rank does with them at a stop.

        No name stands for the unit that was named before.
        """
        done: dict[str, list[str]] = {}
        named: set[int] = set()
        for letter in WORDS:
            orders = set(self.happens[stop].get(letter, ()))
            if not orders:
                continue
            names = list(dict.fromkeys(self._names[order] for order in self.happens[stop][letter]))
            if len(orders) == 1 and orders == named:
                names = []
            elif len(names) > MAX_NAMES:
                names = [f"{len(orders)} units"]
            done[letter] = names
            named = orders if "{}" in WORDS[letter][0] else set()
        return done

    def sentence(self, stop: int) -> str:
        """Return what a rank does at a stop, in words; a page's script says the same."""
        parts = []
        for letter, names in self._done(stop).items():
            with_names, same = WORDS[letter]
            parts.append(with_names.format(", ".join(names)) if names else same)
        return FRAME.format(", ".join(parts), self.held[stop])

    def beneath(self) -> list[str]:
        """Return what lies beneath the shapes of the ranks: gathered units, and whole gradients."""
        bars = [(y, self._lanes.lane) for rank, y in self._lanes.tops if rank is not None]
        gathered = self._layer("gathered", bars, f'stroke="{FILL["gathered"]}" stroke-opacity=".55"')
        whole = self._layer("whole", bars, f'stroke="{FILL["gradients"]}" stroke-opacity=".75"', trained=True)
        return [*gathered, *whole]

    def above(self) -> list[str]:
        """Return what lies above the shapes of the ranks: the gradients that each rank owns."""
        bars = []
        for rank, y in self._lanes.tops:
            if rank is not None:
                top, height = stripe_of(self._plan, rank, self._lanes.lane)
                bars.append((y + top, height))
        return self._layer("own", bars, f'stroke="{FILL["gradients"]}"', trained=True)

    def _layer(
        self, look: str, bars: Sequence[Span | tuple[float, float]], style: str, *, trained: bool = False
    ) -> list[str]:
        """Return an upright line for each slice of a box, whose dashes are the bars: y and height in each lane.

        trained: only of the part of a unit that trains.
        """
        top, bottom = bars[0][0], bars[-1][0] + bars[-1][1]
        dashes, y = "", top
        for bar, height in bars:
            dashes += f"{bar - y:.4g} " if dashes else ""
            dashes += f"{height:.4g} "
            y = bar + height
        html = ""
        slices = self._slices(self._shown[look], trained)
        if not slices:
            return []
        common, _ = Counter(f"{width:.1f}" for _, width in slices).most_common(1)[0]
        for (x, width), spans in slices.items():
            seen = any(first <= self.fullest <= last for first, last in spans)
            at = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
            visible = ' visibility="visible"' if seen else ""
            own_width = "" if f"{width:.1f}" == common else f' stroke-width="{width:.1f}"'
            html += f'<path d="M{x + width / 2:.1f} {top:.4g}V{bottom:.4g}"{own_width} data-at="{at}"{visible}/>'
        looks = f'visibility="hidden" fill="none" {style} stroke-width="{common}" stroke-dasharray="{dashes}9999"'
        return [f'<g class="mm-{look}" {looks}>{html}</g>']

    def _slices(self, shown: Mapping[int, Iterable[Span]], trained: bool) -> dict[tuple[float, float], list[Span]]:
        """Return when each slice of a box is seen, by its x and width: with any of the units that share it."""
        slices: dict[tuple[float, float], list[Span]] = defaultdict(list)
        for box, (x, width) in zip(self._lanes.boxes, self._lanes.places, strict=True):
            number = min(len(box.units), int(width / MIN_SLICE) or 1)
            for index, unit in enumerate(box.units):
                if unit.order in shown:
                    place, share = index * number // len(box.units), width / number
                    part = share * unit.trainable_numel / unit.numel if trained else share
                    slices[x + place * share + share - part, part] += shown[unit.order]
        return {place: _joined(spans) for place, spans in slices.items() if place[1] > 0}

    def line(self, width: int, top: float, bottom: float) -> str:
        """Return the head, and the track that it moves along, for a picture of a step of so many pixels."""
        pixels = (width - LEFT) / len(self.happens)
        at = LEFT + (self.fullest + 0.5) * pixels
        grip = f'<path d="M-{GRIP} {top - 9:g}h{2 * GRIP}v5l-{GRIP} 5l-{GRIP}-5z" fill="currentColor"/>'
        rule = f'<path d="M0 {top:g}V{bottom:g}" stroke="currentColor" stroke-width="1.5"/>'
        frame = f'x="{LEFT}" y="{top:g}" width="{width - LEFT}" height="{bottom - top:g}"'
        track = f'<rect class="mm-head-track" {frame} fill="none" pointer-events="none"/>'
        return (
            f'{track}<g class="mm-head-line" transform="translate({at:.1f} 0)" pointer-events="none">{rule}{grip}</g>'
        )

    def control(self, width: int) -> str:
        """Return what the keyboard moves, with all that a script needs; it is hidden until one runs."""
        index: dict[str, int] = {}
        stops = []
        for stop, held in enumerate(self.held):
            code = ""
            for letter, names in (self._done(stop) | {HELD: [held]}).items():
                code += letter + ",".join(str(index.setdefault(name, len(index))) for name in names)
            stops.append(code)
        words = [f"{letter}{with_names}|{same}" for letter, (with_names, same) in WORDS.items()]
        data = {"words": "\n".join(words)}
        data["frame"] = FRAME
        data["names"] = "\n".join(index)
        data["stops"] = ";".join(stops)
        attributes = ""
        for name, value in data.items():
            attributes += f' data-{name}="{escape(value)}"'.replace("\n", "&#10;")
        return (
            f'<input type="range" class="mm-head" min="0" max="{len(stops) - 1}" value="{self.fullest}" hidden'
            f' style="left:{LEFT}px;width:{width - LEFT}px" aria-label="play head of the step"'
            f' data-lm-suppress-shortcuts="true"{attributes}>'
        )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch as one."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
