"""AllWays: every way to shard the run in one picture, of which a click chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets as w
import traitlets

from ...params import ParamError, RunParams
from .cell import import_lock, receive_while_busy
from .markup import note
from .planned_run import PlannedRun, room
from .static_files import ways_module
from .worker import Worker

if TYPE_CHECKING:
    from ..train.ways import ShardingWay

CURVE_POINTS = 6
"""Budgets of AUTO's curve."""
PLANNING = "planning every way…"


class _Picture(anywidget.AnyWidget):
    """The picture in the page."""

    html = traitlets.Unicode().tag(sync=True)
    pressed = traitlets.Dict().tag(sync=True)
    """The way that was pressed last, and when; the page writes it."""

    def __init__(self) -> None:
        self._esm = ways_module()
        super().__init__()


class AllWays(Worker, w.VBox):
    """All ways to shard a run, drawn with what each sends and holds as they are planned. `show` begins it."""

    def __init__(self, *, choose: Callable[..., None]):
        """choose: called with the parameters of the way that was pressed, by their dotted names."""
        self.picture, self.words = _Picture(), w.HTML()
        self.error_line = self.words
        self._asked: tuple[RunParams, str] | None = None
        self._choose = choose
        self.picture.observe(lambda change: self._pressed(change.new), "pressed")
        super().__init__([self.picture, self.words])
        receive_while_busy(self.picture)

    def show(self, planned: PlannedRun, machine: str) -> None:
        """Draw the ways of a planned run, unless they are drawn or being drawn. machine: of PAGE_MACHINES."""
        if (planned.params, machine) != self._asked:
            self._asked = planned.params, machine
            self.words.value = note(PLANNING, role="status")
            needed = planned.cost.peak_bytes or planned.cost.memory_bytes
            found = room(needed, planned, machine)
            capacity = found.capacity - (found.needed - needed)  # for tensors
            self.work("ways", lambda: self._pictures(planned.params, capacity), show=self._draw)

    def busy_changed(self) -> None:
        """Dim the picture while ways are planned: until then it is the one of other parameters."""
        (self.add_class if self.busy else self.remove_class)("mm-planning-ways")

    def _pictures(self, params: RunParams, capacity: int) -> Iterator[tuple[str, str]]:
        """Yield the picture and the words beneath it, with one way more each time."""
        with import_lock:
            from ..train.ways import ways, ways_of_auto
            from .pictures.ways_picture import ways_picture
        found: list[ShardingWay] = []
        is_first = not self.picture.html
        for way in ways(params):
            found.append(way)
            if is_first:  # later on, the older picture stays until all ways are planned
                yield ways_picture(found, [], capacity=capacity), PLANNING
        refused = [f"{way.name}: {way.refused}" for way in found if way.refused]
        words = ". ".join(["Press a dot to choose its way", *refused])
        yield ways_picture(found, [], capacity=capacity), words
        try:
            curve = list(ways_of_auto(params, CURVE_POINTS))
        except ParamError as error:
            yield ways_picture(found, [], capacity=capacity), f"{words}. AUTO has no line: {error.message}"
            return
        yield ways_picture(found, curve, capacity=capacity), f"{words}. The line is AUTO, as its budget grows"

    def _draw(self, picture_and_words: tuple[str, str]) -> None:
        self.picture.html, words = picture_and_words
        self.words.value = note(words, role="status")

    def _pressed(self, pressed: dict[str, Any]) -> None:
        from ..train.ways import changes_of_ways

        if self._asked and pressed.get("way"):
            changes = changes_of_ways(self._asked[0]).get(str(pressed["way"]))
            if changes:
                self._choose(**changes)
