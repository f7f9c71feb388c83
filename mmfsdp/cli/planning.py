"""The words behind a command; and the commands `mmfsdp plan` and `mmfsdp bench`: predict a step, and measure one."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

from ..core.plan import WrapPlan
from ..params import Backend, LaunchParams, ParamError, RunParams
from ..params.flags import Flags, read_words
from ..params.run import read_cluster

BENCHES = ("step", "wrap")


def parse(command: str, argv: list[str], *, default: RunParams | None = None) -> RunParams:
    """Return the parameters of `--config`, else `default`, with the flags on top; --help prints all and exits.

    Raises ParamError.
    """
    words: list[str] = []
    for word in argv:
        words += ["--train.profile", "3"] if word == "--profile" else [word]
    params, _ = read_words(words, default=default, prog=f"mmfsdp {command} [--config C]")
    return params


def run_folder(argv: list[str]) -> Path:
    """Return the folder of the run that the words name: the folder, or the name of one in the current folder's runs/.

    Raises ParamError if they are not one word.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ParamError("run", f"{' '.join(argv)!r} is not one run folder; name one, such as runs/demo")
    path = Path(argv[0])
    if path.exists() or len(path.parts) > 1:
        return path
    return Path(LaunchParams().folder, path)


def plan(argv: list[str]) -> int:
    """Print the plan and its cost; with --machine the seconds of a step and every mesh.

    Returns 1 where the lint found errors.
    """
    params, machine = read_plan_words(argv)
    planned = print_plan(params)
    if machine and not planned.refused:
        from ..estimate import machine_of, mesh_table, meshes, step_time

        # Figures of the cluster's profile come before those of the machine.
        profile = read_cluster(params.launch.cluster).machine if params.launch.cluster else {}
        figures, sources = machine_of(machine, profile), len(params.data.sources())
        print(step_time(planned, params.train, machine=figures, sources=sources))
        if planned.backend is not Backend.DDP and planned.world_size > 1:
            print(mesh_table(meshes(planned, params.train, machine=figures, sources=sources), figures))
    return int(any(finding.level == "error" for finding in planned.lint))


def read_plan_words(argv: list[str]) -> tuple[RunParams, str | None]:
    """Return the parameters, and the name of --machine. Raises ParamError."""
    flags = Flags()
    flags.add_argument("--machine")
    own, words = flags.parse_known_args(argv)
    return parse("plan", words), own.machine


def print_plan(params: RunParams) -> WrapPlan:
    """Print the plan and its cost, and return it. Raises ParamError for what cannot be planned."""
    from ..train.preview import preview

    planned, cost = preview(params)
    print(planned)
    print(cost)
    return planned


def check_plan(params: RunParams) -> None:
    """Print the lint's findings. Raises ParamError for its errors: they stop a launch."""
    from ..train.preview import check

    for finding in check(params).lint:
        print(f"{finding.level}: {finding.message}", file=sys.stderr)


def bench(argv: list[str]) -> int:
    """Measure `argv[0]`, with the keywords of its function as flags."""
    import torch
    import tyro

    from ..train.job import versions

    name, *flags = argv or [""]
    if name not in BENCHES:
        raise ParamError("bench", f"{name!r} is not a bench; choose {', '.join(BENCHES)}")
    module = import_module(f"mmfsdp.cli.bench_{name}")
    result = tyro.cli(getattr(module, f"bench_{name}"), args=flags, prog=f"mmfsdp bench {name}")
    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    numbers = ", ".join(f"{library} {number}" for library, number in versions().items())
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    result["machine"] = f"{cores}, {device}, load {os.getloadavg()[0]:.1f}; {numbers}; {date.today()}"
    print(f"{result['machine']}\n{module.table(result)}")
    path = Path(f"bench_{name}.json")
    path.write_text(json.dumps(result, indent=1))
    print(f"written to {path}")
    return 0
