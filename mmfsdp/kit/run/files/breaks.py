"""Breaks of a run: where its ranks stopped, and from which step it went on. Read from its events alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

KILLED = "killed"
"""The kind of the event that a rank was killed on purpose."""
STOPS = (KILLED, "failed", "preempted")
"""Kinds of events after which a run may go on from an earlier step."""


class Break(NamedTuple):
    """The end of a life of a run, and the beginning of the next one."""

    kind: str
    """One of STOPS."""
    at: int
    """The step in which the cause was seen."""
    stopped: int
    """The last step that was done: other ranks may do some more."""
    resumed: int | None = None
    """The step from which the run went on; None if it has not."""
    rank: int | None = None
    """The rank that was killed."""

    @property
    def words(self) -> str:
        """Return it as a sentence."""
        what = {KILLED: f"rank {self.rank} was killed", "failed": "failed", "preempted": "preempted"}[self.kind]
        text = f"{what} at step {self.at}"
        if self.resumed is None:
            return text
        text += f", resumed from step {self.resumed}"
        first = self.resumed + 1
        if first > self.stopped:
            return text
        steps = f"step {first}" if first == self.stopped else f"steps {first} to {self.stopped}"
        return f"{text}: {steps} ran again"


def breaks_of(events: Iterable[Mapping[str, Any]], *, first_row: float = 0.0) -> list[Break]:
    """Return the breaks of a run, oldest first.

    events: as `read_events` returns them. first_row: time of the first row of its metrics. A run without a checkpoint
    begins anew, and no event says so; its rows are newer than the break then.
    """
    breaks: list[Break] = []
    is_open, time = False, 0.0
    for event in events:
        kind, step = event["kind"], event["step"]
        if kind in STOPS and is_open:  # the first one is the cause; the ranks had not all stopped then
            breaks[-1] = breaks[-1]._replace(stopped=max(step, breaks[-1].stopped))
        elif kind in STOPS:
            breaks.append(Break(kind, step, step, rank=event.get("rank", 0) if kind == KILLED else None))
            is_open, time = True, event.get("time", 0.0)
        elif kind == "resumed" and is_open:
            breaks[-1], is_open = breaks[-1]._replace(resumed=step), False
    if is_open and first_row > time:
        breaks[-1] = breaks[-1]._replace(resumed=0)
    return breaks
