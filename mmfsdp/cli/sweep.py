"""`mmfsdp sweep`: start a sweep, look at one, run its failed members again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ..loading import collector_paused
from ..params import ParamError, RunParams
from ..params.run import read_yaml
from .start import prepare
from .words import one_run, parse

HELP = """mmfsdp sweep [--config C] [--grid FIELD=A,B ...] [--file SWEEP.yaml] [--at-once N] [--detach] [flags]
    start a run for each combination, N at a time; the rest as for `mmfsdp launch`. launch.name names the sweep
    --grid FIELD=A,B FIELD=C,D   values to try; a list in brackets is YAML: data.more=[[], [{...}]]
    --file SWEEP.yaml            grid: {FIELD: [A, B]}, overrides: [{FIELD: A, ...}], at_once: N
    --detach                     return at once; else wait for the end (Ctrl-C leaves the sweep running)
mmfsdp sweep FOLDER                    its table
mmfsdp sweep FOLDER --again [MEMBER ...] run members again that failed or were cancelled: those named, or all
mmfsdp cancel FOLDER                   stop all of it"""


def sweep(argv: list[str]) -> int:
    """Start a sweep, or look at one. Returns 1 if a member failed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if not argv[0].startswith("-"):
        return _look(argv)
    from ..launch import sweep as start
    from ..launch.start import check as check_start

    params, asked, detach = read(argv)
    check_start(params)
    prepare(params)
    found = start(params, check=_plan_check(), **asked)
    print(f"{found.path}: {len(found.members)} runs, {asked.get('at_once', 1)} at a time", flush=True)
    return 0 if detach else _follow(found)


def read(argv: list[str]) -> tuple[RunParams, dict[str, Any], bool]:
    """The shared parameters, the other arguments of `launch.sweep`, and whether to return at once."""
    from ..params.flags import number_taken, taken

    argv, detach = [word for word in argv if word != "--detach"], "--detach" in argv
    asked = _read_file(taken(argv, "--file"))
    asked["grid"] = asked.get("grid", {}) | dict(_choices(text) for text in taken(argv, "--grid", many=True))
    if at_once := number_taken(argv, "--at-once", "runs"):
        asked["at_once"] = at_once
    return parse("sweep", argv), asked, detach


def _look(argv: list[str]) -> int:
    from ..launch import Sweep

    path = one_run(argv[:1])
    found = Sweep.open(path)
    if argv[1:2] == ["--again"]:
        print(f"again: {', '.join(found.again(*argv[2:])) or 'none'}", flush=True)
        return _follow(found)
    if argv[1:]:
        raise ParamError("sweep", f"{argv[1]!r} is no option of a sweep that is there already; only --again is")
    print(found)
    return int(any(state.done and not state.ok for state in found.states().values()))


def _follow(found: Any) -> int:
    """Wait for the end, telling of each member that comes to its own; then the table."""
    told: set[str] = set()
    while True:
        over = found.done()
        for name, state in found.states().items():
            if state.done and name not in told:
                told.add(name)
                print(f"{name}: {state}", flush=True)
        if over:
            break
        found.wait(1.0)
    print(found)
    return int(not all(state.ok for state in found.states().values()))


def _choices(text: str) -> tuple[str, list[Any]]:
    """`train.lr=1e-3,3e-4` as the field and its values."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ParamError("grid", f"{text!r} is not FIELD=VALUE,VALUE, such as train.lr=1e-3,3e-4")
    if values.startswith("["):
        return name, read_yaml(values, name="grid")
    return name, [read_yaml(value, name="grid") for value in values.split(",")]


def _read_file(paths: list[str]) -> dict[str, Any]:
    """The keyword arguments of `launch.sweep` that a YAML file holds."""
    if not paths:
        return {}
    try:
        values = yaml.safe_load(Path(paths[0]).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ParamError("file", f"{paths[0]} is not YAML: {error}") from None
    kinds: dict[str, type] = {"grid": dict, "overrides": list, "at_once": int}
    for key, value in values.items() if isinstance(values, dict) else [("", values)]:
        if key not in kinds or not isinstance(value, kinds[key]):
            raise ParamError("file", f"{paths[0]}: {key!r}: may hold grid (a mapping), overrides (a list), at_once")
    return values


def _plan_check() -> Callable[[RunParams], None]:
    """What the lint calls an error stops a sweep before any of it starts; members of one plan are looked at once."""
    with collector_paused(for_good=True):
        from ..preview import check

    seen: set[str] = set()

    def check_once(params: RunParams) -> None:
        key = repr((params.model, params.fsdp, params.launch.ranks))
        if key not in seen:
            seen.add(key)
            check(params)

    return check_once
