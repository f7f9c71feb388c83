"""Find the run that has been launched with the same parameters already: a notebook that runs again goes on with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...own.calls import load_own
from ...params import ParamError, RunParams
from ...params.base import leaves
from ...params.own import own_fields
from .handle import Run
from .launchers.registry import launcher_named
from .own_code import read_code, sources_of
from .rank_count import with_ranks
from .start import name_taken, runs_folder
from .state import is_run

IGNORED = {"launch.name", "launch.folder", "launch.replace"}
"""Parameters that do not make another run."""
MAX_DIFFERENCES = 3
"""Differences that are told."""


class Match(NamedTuple):
    """A run that is there already for parameters that are to be launched, or a free name."""

    run: Run | None
    """The run with the same parameters."""
    params: RunParams
    """The parameters, with a name that is free if there is no such run."""
    words: str = ""
    """The reason why the name is another one; empty if it is not."""


def find_same(params: RunParams) -> Match:
    """Return the run of this name with the same parameters, or of the names that follow it (tiny, tiny-2, tiny-3)."""
    params = with_ranks(params)
    parent = runs_folder(params.launch)
    name, number, words = params.launch.name, 1, ""
    while os.path.lexists(parent / name):
        if is_run(parent / name):
            run = Run(parent / name)
            different = differences(run, params)
            if not different:
                return Match(run, params.change(**{"launch.name": name}), "")
            words = words or (different if is_replay(run) else f"the run {name} has other choices: {different}")
        else:
            words = words or f"{str(parent / name)!r} is not a run"
        number += 1
        name = f"{params.launch.name}-{number}"
    if number > 1:
        words += f". This one is {name}."
    return Match(None, params.change(**{"launch.name": name}), words)


def check_name(params: RunParams) -> None:
    """Raise ParamError if a run has this name that a launch may not rename; it says in what that run differs."""
    run = Run(Path(params.launch.folder) / params.launch.name)
    if not is_run(run.path) or (params.launch.replace and run.state().done):
        return
    different = differences(run, with_ranks(params))
    with_what = f"with the same parameters, and Run.open({str(run.path)!r}) opens it"
    if is_replay(run):
        with_what = ""  # its state says so
    elif different:
        with_what = f"with other parameters: {different}"
    raise ParamError("launch.name", name_taken(run.path, with_what))


def differences(run: Run, params: RunParams) -> str:
    """Return in what the parameters of a run differ from others, in a line; "" if they are the same.

    A replay differs from each run. Raises OwnCodeError for own code that cannot be imported any more.
    """
    if is_replay(run):
        return f"{run.name} is a replay of a recording"
    try:
        theirs = leaves(run.params.to_dict())
    except (OSError, ValueError) as error:
        return f"its parameters cannot be read ({error})"
    ours = leaves(params.to_dict())
    lines = []
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in IGNORED and theirs.get(name) != ours.get(name):
            lines.append(f"{name} {str(theirs.get(name))[:40]}, not {str(ours.get(name))[:40]}")
    if changed := changed_code(run, params):
        lines.append(f"its own code, which has changed since ({', '.join(changed)})")
    more = f" and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    return ", ".join(lines[:MAX_DIFFERENCES]) + more


def is_replay(run: Run) -> bool:
    """Return True for a replay: nothing was trained in there."""
    record = run.record
    return record is not None and not launcher_named(record.executor).has_ranks


def changed_code(run: Run, params: RunParams) -> list[str]:
    """Return the files of a person's own code that are other ones now than at the launch of a run."""
    for field, value in own_fields(params):
        load_own(field, value)  # afresh if its file was edited
    before, now = read_code(run.path), sources_of(params).files
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
