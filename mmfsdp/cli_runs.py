"""The commands over runs that are there already: runs, cancel, drill. Imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .params import LaunchParams, ParamError


def one_run(argv: list[str]) -> Path:
    """The run that a person means: a folder, or the name of one in the current folder's runs/."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ParamError("run", f"{' '.join(argv)!r} is not one run folder; name one, such as runs/demo")
    path, named = Path(argv[0]), Path(LaunchParams().folder, argv[0])
    return path if path.exists() or len(path.parts) > 1 else named


def is_sweep(path: Path) -> bool:
    """Whether a folder is a sweep's."""
    from .runs.listing import SWEEP

    return os.path.isfile(path / SWEEP)


def list_runs(argv: list[str]) -> int:
    """All runs in the folders named, or in runs/."""
    from .runs import whose
    from .runs.listing import find_runs, runs_table

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
    from .launch import Run, Sweep

    path = one_run(argv)
    if is_sweep(path):
        Sweep(path).cancel()
        print(Sweep(path))
        return 0
    run = Run.open(path)
    print(f"{run.name}: {run.cancel()}")
    return 0


def drill(argv: list[str]) -> int:
    """Preempt a run as a cluster would, and follow it until it goes on. Returns 1 if it does not."""
    from .launch import Run
    from .launch.drill import followed

    run, began = Run.open(one_run(argv)), time.time()
    run.drill()
    kind = ""
    for event in followed(run, since=began):
        kind = event["kind"]
        print(f"{event['time'] - began:6.1f} s  {kind:<9}  {event['text']}", flush=True)
    if kind != "resumed":
        print(f"{run.name}: {run.state()}")
    return int(not (kind == "resumed" or run.state().ok))
