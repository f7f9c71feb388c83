"""Find the run that has been launched with the same parameters already: a notebook that runs again goes on with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..params import RunParams
from ..params.base import leaves
from .handle import Run
from .placement import with_ranks
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
    """Why the name is another one; empty if it is not."""


def find_same(params: RunParams) -> Match:
    """Return the run of this name with the same parameters, or of the names that follow it (tiny, tiny-2, tiny-3)."""
    params = with_ranks(params)
    parent = Path(os.path.expanduser(params.launch.folder)).absolute()
    name, number, words = params.launch.name, 1, ""
    while os.path.lexists(parent / name):
        if is_run(parent / name):
            run = Run(parent / name)
            different = differences(run, params)
            if not different:
                return Match(run, params.change(**{"launch.name": name}), "")
            words = words or f"the run {name} has other choices: {different}"
        else:
            words = words or f"{str(parent / name)!r} is not a run"
        number += 1
        name = f"{params.launch.name}-{number}"
    if number > 1:
        words += f". This one is {name}."
    return Match(None, params.change(**{"launch.name": name}), words)


def free_name(params: RunParams) -> str:
    """Return the first of tiny, tiny-2, tiny-3 that no folder has."""
    parent = Path(os.path.expanduser(params.launch.folder)).absolute()
    name, number = params.launch.name, 1
    while os.path.lexists(parent / name):
        number += 1
        name = f"{params.launch.name}-{number}"
    return name


def differences(run: Run, params: RunParams) -> str:
    """Return in what the parameters of a run differ from others, in a line; "" if they are the same."""
    try:
        theirs = leaves(run.params.to_dict())
    except (OSError, ValueError) as error:
        return f"its parameters cannot be read ({error})"
    ours = leaves(params.to_dict())
    lines = []
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in IGNORED and theirs.get(name) != ours.get(name):
            lines.append(f"{name} {str(theirs.get(name))[:40]}, not {str(ours.get(name))[:40]}")
    more = f" and {len(lines) - MAX_DIFFERENCES} more" if len(lines) > MAX_DIFFERENCES else ""
    return ", ".join(lines[:MAX_DIFFERENCES]) + more
