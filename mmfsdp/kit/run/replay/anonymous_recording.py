"""Make a recording that can be handed on: a small file without weights, without names of people, machines or folders.

Rows of metrics are thinned and rounded, and logs are cut. Neutral names replace host names and the user's name, an
absolute path keeps its last two parts, and IP addresses become 10.0.0.1 and so on. Read the file before you publish it:
what a person's own code has printed may tell more.
"""

from __future__ import annotations

import getpass
import math
import os
import pwd
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ....params import ParamError
from ..files.folder import PathLike
from ..files.run_record import RunRecord, rank_statuses
from ..launchers.registry import check_no_replay
from ..state import run_state
from .recorder import recording_of
from .recording import KINDS, LOG, MAX_ABOUT, ROW, Moment, Recording, thinned

DIGITS = 5
"""Significant digits of numbers in rows."""
MAX_ROWS = 200
"""Rows of each rank; of more, a quarter at the start and at the end stay, and every k-th of those between."""
LOG_HEAD, LOG_TAIL = 60, 140
"""Lines that stay of a longer log."""
NEUTRAL_USERS = ("root", "user", "~")
PATH = re.compile(r"(?<![\w.:/])~?(?:/[\w.+@-]+){3,}")
"""An absolute path with more than two parts; not one in a URL."""
ADDRESS = re.compile(r"\b(?!127\.)\d{1,3}(?:\.\d{1,3}){3}\b|\bfe80:[0-9a-fA-F:]+(?:%\w+)?")


def record(run: PathLike, to: PathLike, *, about: str) -> Path:
    """Write the recording of a run that has ended into a new file, small and with neutral names. Return its path.

    Args:
        run: The folder of the run.
        to: The file, such as hang.jsonl, which must not exist.
        about: What the run was made on, which every replay shows.

    Raises:
        ParamError: If the run goes on, is a replay or cannot be read, and if the file exists.
    """
    folder, to, about = Path(os.path.expanduser(run)).absolute(), Path(os.path.expanduser(to)), " ".join(about.split())
    if not about:
        raise ParamError("about", "is empty; say what the run was made on, such as '2 ranks on one laptop, CPU, gloo'")
    if len(about) > MAX_ABOUT:
        raise ParamError("about", f"has {len(about)} characters; a recording keeps {MAX_ABOUT}")
    check_no_replay(folder, "recorded")
    recording = recording_of(folder)
    if not (state := run_state(folder)).done:
        raise ParamError("run", f"{folder} is {state}; record it once it has ended")
    if os.path.lexists(to):
        raise ParamError("to", f"{str(to)!r} exists already; choose another name")
    if not to.absolute().parent.is_dir():
        raise ParamError("to", f"{str(to.parent)!r} is no folder; make it first")
    small = neutral(smaller(recording), names_of(folder))
    replace(small, about=about).write(to)
    return to


def smaller(recording: Recording) -> Recording:
    """Return a recording with rows thinned and rounded, and logs cut."""
    kept: list[Moment] = []
    by_part = sorted(recording.moments, key=lambda moment: (KINDS.index(moment.kind), moment.rank))
    for (kind, _), group in groupby(by_part, key=lambda moment: (moment.kind, moment.rank)):
        moments = list(group)
        if kind == ROW:
            moments = [moment._replace(value=_rounded(moment.value)) for moment in thinned(moments, MAX_ROWS)]
        elif kind == LOG and len(moments) > LOG_HEAD + LOG_TAIL:
            gap = len(moments) - LOG_HEAD - LOG_TAIL
            words = moments[LOG_HEAD]._replace(value=f"[... {gap:,} lines not recorded ...]")
            moments = [*moments[:LOG_HEAD], words, *moments[-LOG_TAIL:]]
        kept += moments
    order = {id(moment): number for number, moment in enumerate(recording.moments)}
    kept.sort(key=lambda moment: (moment.at, order.get(id(moment), 0)))
    return replace(recording, moments=kept)


def _rounded(value: Any) -> Any:
    """Return a value with its numbers rounded."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def names_of(folder: Path) -> dict[str, str]:
    """Return the names of machines and people in a run folder, with a neutral name for each."""
    hosts = []
    run = RunRecord.read(folder)
    if run is not None:
        hosts += [status["host"] for status in rank_statuses(folder, run) if status.get("host")]
        hosts.append(run.host)
    hosts.append(socket.gethostname())
    names: dict[str, str] = {}
    for host in hosts:
        machine = names.setdefault(host, f"node{len(set(names.values())) + 1}")
        names.setdefault(host.partition(".")[0], machine)
    users = {Path(os.path.expanduser("~")).name}
    with suppress(KeyError, OSError):  # in many containers the password database lacks the user
        users.add(getpass.getuser())
    with suppress(KeyError):
        users.add(pwd.getpwuid(folder.stat().st_uid).pw_name)
    names |= dict.fromkeys(users - set(NEUTRAL_USERS), "user")
    return {name: neutral_name for name, neutral_name in names.items() if name}


def neutral(recording: Recording, names: dict[str, str]) -> Recording:
    """Return a recording in which all texts have neutral names."""
    addresses: dict[str, str] = {}
    longest_first = sorted(names, key=len, reverse=True)
    known = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in longest_first) or "(?!)")

    def change(text: str) -> str:
        text = PATH.sub(lambda found: ".../" + "/".join(found[0].split("/")[-2:]), text)
        text = ADDRESS.sub(lambda found: addresses.setdefault(found[0], f"10.0.0.{len(addresses) + 1}"), text)
        return known.sub(lambda found: names[found[0]], text)

    moments = [moment._replace(value=_in_texts(moment.value, change)) for moment in recording.moments]
    params, plan = _in_texts(recording.params, change), _in_texts(recording.plan, change)
    if isinstance(params.get("launch"), dict):
        params["launch"]["folder"] = "runs"
    return replace(recording, params=params, plan=plan, moments=moments)


def _in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all its texts changed, but not the names of its fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_in_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {key: _in_texts(item, change) for key, item in value.items()}
    return value
