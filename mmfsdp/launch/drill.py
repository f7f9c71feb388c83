"""drill(run): a preemption on demand, to see before the night of the run that it goes on as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..runs import note, read_events

if TYPE_CHECKING:
    from .run import Run


def drill(run: Run) -> None:
    """Send every rank of a run what a cluster sends before it takes the nodes away; returns at once.

    The ranks save after the step they are in, end, and are started again; events.jsonl tells of each part. Works from
    any machine that sees the folder. Raises ParamError where nothing runs, or what runs is not one's own.
    """
    from ..params import ParamError

    if (state := run.own().state()).done:
        raise ParamError("run", f"{run.path} is {state}; a drill needs a run that goes on")
    note(run.path, "drill", step=state.step, text="a drill: the ranks are asked to make room")
    (run.path / "drill").touch()  # its supervisor passes it on


def followed(run: Run, *, since: float) -> Iterator[dict[str, Any]]:
    """The events of a run from `since` (unix seconds) on, as they happen, to the one that tells it goes on; or to the
    end of the run, which may come first."""
    seen = len([row for row in read_events(run.path) if row["time"] < since])
    while True:
        over = run.state().done
        rows = read_events(run.path)[seen:]
        seen += len(rows)
        for row in rows:
            yield row
            if row["kind"] == "resumed":
                return
        if over:
            return
        time.sleep(0.1)
