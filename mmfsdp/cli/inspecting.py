"""The commands over runs that exist already: runs, cancel, report, export."""

from __future__ import annotations

import os
from pathlib import Path

from ..params import LaunchParams, ParamError
from .planning import run_folder


def runs(argv: list[str]) -> int:
    """List all runs in the folders named, or in runs/."""
    from ..run.state import find_runs, runs_table

    default = LaunchParams().folder
    for word in argv:
        if word.startswith("-"):
            raise ParamError("runs", f"unknown option {word!r}; name folders of runs, or nothing for {default}")
    for folder in argv or [default]:
        summaries = find_runs(folder)
        print(runs_table(summaries) if summaries else f"no runs in {folder}")
        print_unreadable(folder)
    return 0


def print_unreadable(folder: str) -> None:
    """Print which folders this person may not read: runs may be in them."""
    from ..run.folder import owner_hint

    for path in sorted(Path(folder).glob("*/")):
        if not os.access(path, os.R_OK | os.X_OK):
            print(f"{path} cannot be read{owner_hint(path)}")


def cancel(argv: list[str]) -> int:
    """Stop a run, every rank of it; or a sweep, every run of it."""
    from ..run.launch import Run
    from ..run.state import SWEEP_FILE
    from ..run.sweep import Sweep

    path = run_folder(argv)
    if os.path.isfile(path / SWEEP_FILE):
        members = Sweep(path)
        members.cancel()
        print(members)
        return 0
    run = Run.open(path)
    print(f"{run.name}: {run.cancel()}")
    return 0


def report(argv: list[str]) -> int:
    """Write a run's report, or a page that compares runs."""
    from ..run.launch import Run
    from ..widgets.compare import write_comparison
    from ..widgets.report import write_report

    if len(argv) < 2:
        print(write_report(Run.open(run_folder(argv)).path))
        return 0
    paths = [run_folder([name]) for name in argv]
    print(write_comparison(paths, paths[0].absolute().parent / "comparison.html"))
    return 0


def export(argv: list[str]) -> int:
    """Write a run's weights in the layout of other libraries."""
    from ..compat.export import export as write
    from ..run.launch import Run

    if len(argv) not in (2, 3):
        raise ParamError("export", "usage: mmfsdp export RUN NEW_FOLDER [LAYOUT]")
    layout = {"layout": argv[2]} if len(argv) == 3 else {}
    print(write(Run.open(run_folder(argv[:1])).path, Path(argv[1]), **layout))
    return 0
