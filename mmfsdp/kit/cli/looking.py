"""The commands that look at runs which are there already, or stop them: runs, status, watch, cancel, report, export."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ...params import LaunchParams
from ...params.base import without_controls
from ..run.files.run_record import Status
from ..run.files.snapshot import Snapshot
from ..run.handle import Run
from ..run.progress import part_of
from ..run.state import SWEEP_FILE, ask_ahead, find_runs, list_runs, read_ranks, run_state, runs_table
from ..run.sweep import Sweep
from ..run.trouble import headline, troubles
from ..run.watch import Progress
from ..run.watch import follow as lines_of
from .json_output import reply, write
from .planning import run_folder, say
from .running import follow, opened, show

if TYPE_CHECKING:
    from .answers import StatusAnswer

ANSWER_TIMEOUT_S = 60.0
"""Seconds that a command waits for Slurm before it ends."""
LAST_LINES = 20
"""Lines of the traceback, or of the log, of a run that has failed."""
ASKING = f"waiting for Slurm's answer, at most {ANSWER_TIMEOUT_S:.0f} s"


def runs(values: Namespace) -> int:
    """List all runs in the folders named, or in runs/."""
    listed = []
    for folder in values.folders or [LaunchParams().folder]:
        paths = find_runs(folder)
        # One question to Slurm for all runs, in place of one for each.
        ask_ahead(paths.values(), timeout=ANSWER_TIMEOUT_S)
        if values.json:
            listed += list_runs(paths)
        else:
            show(runs_table(paths) if paths else f"no runs in {folder}")
    if values.json:
        from .answers import RunsAnswer

        return reply(values, RunsAnswer(ok=True, runs=listed))
    return 0


def status(values: Namespace) -> int:
    """Print the state of a run, what it does now, and what is wrong with it. Returns 1 if it ended and is not ok."""
    asked = Run.open(run_folder(values.run))
    ask_ahead([asked.path], timeout=ANSWER_TIMEOUT_S)
    if values.json:
        return reply(values, status_answer(asked.path))
    look = Snapshot(asked.path)
    state = run_state(look)
    found = troubles(look, state)
    show(f"{asked.name}: {headline(state, found)}")
    part = part_of(look, state)
    if part is not None:
        show(f"{part.part}: {part.words}", Progress(asked.path).line(state, look))
    show(*(f"trouble: {trouble}" for trouble in found))
    if state.status is Status.FAILED and state.traceback.strip():
        show(*state.traceback.rstrip().splitlines()[-LAST_LINES:])
    return int(state.done and not state.ok)


def status_answer(folder: Path) -> StatusAnswer:
    """Return the state of a run for programs."""
    from .answers import StatusAnswer

    look = Snapshot(folder)
    state = run_state(look)
    ranks = read_ranks(look, look.record.ranks if look.record else 0, state)
    part = part_of(look, state, ranks=ranks)
    progress = Progress(folder)
    progress.add(look.rows())
    return StatusAnswer(
        ok=state.ok or not state.done,
        name=folder.name,
        path=str(folder),
        status=str(state.status),
        done=state.done,
        succeeded=state.ok,
        step=state.step,
        steps=state.steps,
        why=state.why or None,
        notes=list(state.notes),
        part=part.part if part else "",
        doing=part.words if part else "",
        seconds_left=None if state.done else progress.seconds_left(state),
        metrics=look.last_row(),
        ranks=ranks,
        troubles=troubles(look, state, ranks=ranks),
        traceback=state.traceback,
    )


def watch(values: Namespace) -> int:
    """Follow a run."""
    if not values.json:
        return follow(run_folder(values.run))
    from .answers import WatchLine

    folder = Run.open(run_folder(values.run)).path
    for line in lines_of(folder):
        write(values.stdout, WatchLine(kind=line.kind, text=without_controls(line.text), rank=line.rank))
    return reply(values, status_answer(folder))


def cancel(values: Namespace) -> int:
    """Stop a run, every rank of it; or a sweep, every run of it."""
    path = run_folder(values.run)
    if os.path.isfile(path / SWEEP_FILE):
        members = Sweep(path)
        states = members.cancel()
        if not all(state.done for state in states.values()):
            show(members, ASKING)
            members.wait(ANSWER_TIMEOUT_S)
        show(members)
    else:
        cancelled = Run.open(path)
        state = cancelled.cancel()
        if not state.done:
            show(f"{cancelled.name}: {state}", ASKING)
            state = cancelled.wait(ANSWER_TIMEOUT_S)
        show(f"{cancelled.name}: {state}")
    return 0


def report(values: Namespace) -> int:
    """Write a run's report, or a page that compares runs."""
    paths = [run_folder(name) for name in values.runs]
    opened = [Run.open(path).path for path in paths]
    from ..widgets.compare import write_comparison
    from ..widgets.report import write_report

    if len(opened) == 1:
        show(write_report(opened[0]))
        return 0
    show(write_comparison(paths, paths[0].absolute().parent / "comparison.html"))
    return 0


def export(values: Namespace) -> int:
    """Write a run's weights in the layout of other libraries."""
    exported = opened(values)
    say("reading the checkpoint")
    from ..compat.export import export as export_model

    show(export_model(exported.path, Path(values.to), layout=values.layout, best=values.best, ema=values.ema))
    return 0
