"""The commands over runs that are there already: runs, cancel, drill, report, export."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..params import LaunchParams, ParamError
from .words import one_run


def runs(argv: list[str]) -> int:
    """All runs in the folders named, or in runs/."""
    from ..runs import whose
    from ..runs.listing import find_runs, runs_table

    if flags := [word for word in argv if word.startswith("-")]:
        raise ParamError(
            "runs", f"{flags[0]!r} is no option; name folders of runs, or nothing for {LaunchParams().folder}"
        )
    for folder in argv or [LaunchParams().folder]:
        found = find_runs(folder)
        print(runs_table(found) if found else f"no runs in {folder}")
        closed: dict[str, list[Path]] = {}
        for path in sorted(Path(folder).iterdir()) if os.path.isdir(folder) else ():
            if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
                closed.setdefault(whose(path, to_read=True), []).append(path)
        for why, paths in closed.items():
            print(f"{paths[0]} is closed{why}{f'; so are {len(paths) - 1} more' if paths[1:] else ''}")
    return 0


def cancel(argv: list[str]) -> int:
    """Stop a run, every rank of it; or a sweep, every run of it."""
    from ..launch import Run, Sweep
    from ..runs.listing import SWEEP

    path = one_run(argv)
    if os.path.isfile(path / SWEEP):
        Sweep(path).cancel()
        print(Sweep(path))
        return 0
    run = Run.open(path)
    print(f"{run.name}: {run.cancel()}")
    return 0


def drill(argv: list[str]) -> int:
    """Preempt a run as a cluster would, and follow it until it goes on. Returns 1 if it does not."""
    from ..launch import Run
    from ..launch.drill import followed

    run, began = Run.open(one_run(argv)), time.time()
    run.drill()
    kind = ""
    for event in followed(run, since=began):
        kind = event["kind"]
        print(f"{event['time'] - began:6.1f} s  {kind:<9}  {event['text']}", flush=True)
    if kind != "resumed":
        print(f"{run.name}: {run.state()}")
    return int(not (kind == "resumed" or run.state().ok))


def report(argv: list[str]) -> int:
    """Write a run's report, or a page of runs compared."""
    from ..report import write_comparison, write_report
    from ..report.html import writable

    paths = [one_run([name]) for name in argv] or [one_run(argv)]
    if len(paths) == 1:
        from ..launch import Run

        print(write_report(Run.open(paths[0]).path))
        return 0
    print(write_comparison(paths, writable(paths[0].absolute().parent / "comparison.html")))
    return 0


def export(argv: list[str]) -> int:
    """Write a run's weights for others."""
    from ..export import export as write
    from ..launch import Run

    if not 2 <= len(argv) <= 3:
        raise ParamError("export", "takes a run folder, a new folder, and perhaps a layout")
    print(write(Run.open(one_run(argv[:1])).path, Path(argv[1]), **({"layout": argv[2]} if argv[2:] else {})))
    return 0
