"""The commands `mmfsdp plan`, `fit`, `verify` and `bench`: predict, solve backwards, check and measure."""

from __future__ import annotations

import json
import os
import platform
import sys
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...core.plan import WrapPlan
from ...params import LaunchParams, ParamError, RunParams, preset_names
from ...params.findings import Finding
from ...params.in_words import WIDTH
from ...params.phases import Phase, phases_of
from ..run.hub_cache import tell_of_hub
from ..run.watch import ProgressBar
from .flags import params_of
from .json_output import reply

if TYPE_CHECKING:
    from ...predict import Estimate, Mesh, Times
    from ..data.open_sources import Splits
    from ..train.prepare import Prepared

CHECKING = "checking the data and the plan"


def run_folder(word: str) -> Path:
    """Return the folder of the run that a word names: the folder, or the name of one in the current folder's runs/."""
    path = Path(word)
    if path.exists() or len(path.parts) > 1:
        return path
    return Path(LaunchParams().folder, path)


def gibibytes(text: str) -> float:
    """Return the number above 0 that a flag gives; argparse words the error."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ArgumentTypeError(f"{text!r} is not a number of GiB above 0")
    return number


def say(text: str) -> None:
    """Say on stderr what takes the next seconds; stdout has the results."""
    print(f"{text} ...", file=sys.stderr, flush=True)


def chosen_params(values: Namespace, *, default: RunParams | None = None) -> RunParams:
    """Return the parameters that a command's words say. Raises ParamError for a mistake, and if they name no model.

    default: of which the words change some.
    """
    params = params_of(values, default=default)
    names_model = any(name.startswith("model.") for name in (*vars(values), *values.entries))
    # The defaults name no weights: their plan would be of a model that nobody trains.
    if default is None and not values.config and not names_model:
        example = "tiny" if values.parser.takes_config else "--config tiny"
        words = f"is missing: name what to train, as in `mmfsdp {values.call.__name__} {example}`. It is a YAML file,"
        raise ParamError("config", f"{words} such as `mmfsdp new` writes, or a preset: {', '.join(preset_names())}")
    return params


def plan(values: Namespace) -> int:
    """Print the plan and its cost, of each phase; with --machine the seconds of a step and every mesh.

    Returns 1 where the lint found errors.
    """
    params = chosen_params(values)
    tell_of_hub(say)
    say("planning: a model without weights, a step on tensors without data")
    from ..train.prepare import quick_look
    from ..train.ways import ways, ways_table

    phases = phases_of(params)
    sources, found = quick_look(params, all_data=values.all_data)
    plans = [planned_phase(phase, values.machine, sources, found, all_data=values.all_data) for phase in phases]
    if values.json:
        from .answers import ShardingFigures
        from .plan_answer import later_phase, plan_answer

        first, *later = [plan_answer(*each) for each in plans]
        after = [later_phase(phase.begin, each) for phase, each in zip(phases[1:], later, strict=True)]
        is_ok = all(each.ok for each in (first, *later))
        compared_ways = [ShardingFigures(**asdict(way)) for way in ways(phases[0].params, values.machine)]
        return reply(values, first.model_copy(update={"ok": is_ok, "later": after, "ways": compared_ways}))
    for phase, (planned, cost, rates, times, compared) in zip(phases, plans, strict=True):
        if len(phases) > 1:
            print(f"{phase}:")
        print(planned)
        print(cost)
        if rates:
            print(textwrap.fill(rates, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
        if times is not None:
            print(times)
        if compared:
            from ...predict import machine_of_run, mesh_table

            print(mesh_table(compared, machine_of_run(values.machine, params)))
    print(ways_table(list(ways(phases[0].params, values.machine))))
    return int(any(planned.refused for planned, *_ in plans))


class PlannedPhase(NamedTuple):
    """The plan of a phase of a run, as `plan_answer` takes it."""

    plan: WrapPlan
    cost: Estimate
    rates: str
    times: Times | None
    meshes: list[Mesh]


def planned_phase(
    phase: Phase,
    machine: str | None,
    sources: Mapping[str, Splits] | None,
    found: Sequence[Finding],
    *,
    all_data: bool = False,
) -> PlannedPhase:
    """Plan a phase of a run; with the name of a machine, also predict its seconds. Raises ParamError.

    sources, found: what `quick_look` returned of the data. all_data: look at the size of every record, however long it
    takes.
    """
    from ...lint.cost import units_to_compile
    from ..train.prepare import preview, rates_of, with_notices, with_place

    planned, cost = preview(phase.params, sources, **({"most": None} if all_data else {}))
    planned = with_place(with_notices(planned, found), phase.params)
    rates = rates_of(phase.params, planned)
    times, compared = on_machine(machine, planned, phase.params)
    if times is not None and times.usual:
        found_by_times = units_to_compile(
            planned,
            machine=times.machine,
            seconds=times.eager,
            compiled_seconds=times.compiled,
            steps=phase.params.train.steps,
        )
        planned = replace(planned, lint=(*planned.lint, *found_by_times))
    return PlannedPhase(planned, cost, rates, times, compared)


def on_machine(name: str | None, planned: WrapPlan, params: RunParams) -> tuple[Times | None, list[Mesh]]:
    """Return the seconds of a step on the machine of this name, and every mesh of the plan's ranks, the best first.

    None without a name, or for a plan with errors; no meshes where there are none to choose.
    """
    if not name or planned.refused:
        return None, []
    from ...predict import machine_of_run, meshes, step_time, workload

    machine, work = machine_of_run(name, params), workload(planned, params)
    times = step_time(planned, machine=machine, **work)
    # DDP, or a single rank along the shard axis, has no mesh to choose.
    if not planned.rules.shards or planned.shard == 1:
        return times, []
    return times, meshes(planned, machine=machine, **work)


def fit(values: Namespace) -> int:
    """Print what fits into the memory of a GPU: the largest batch, or what --for says. Returns 1 where nothing does."""
    params = chosen_params(values)
    tell_of_hub(say)
    from ...predict import gpu_with, machine_of_run

    if (values.machine is None) == (values.memory is None):
        words = (
            "is needed: one of the machines of `mmfsdp plan`, such as rtx4090-pcie, or --memory with the GiB of a GPU"
        )
        raise ParamError("--machine", words)
    machine = gpu_with(values.memory) if values.memory else machine_of_run(values.machine, params)
    say("fitting: a model without weights, steps of several sizes on tensors without data")
    from ..train.fit import fit as solve

    solved = solve(params, machine, *values.asked)
    if values.json:
        from .fit_answer import fit_answer

        return reply(values, fit_answer(solved))
    print(solved)
    return int(not solved.all_fit)


def verify(values: Namespace) -> int:
    """Check a training on two ranks of the CPU, and print a line for each check. Returns 1 if one finds a fault."""
    params = chosen_params(values)
    tell_of_hub(say)
    say("verifying: two steps on two CPU ranks and in one process, a kill, a resume, an export")
    pretrain(params)
    from ..verify.from_params import verify_run

    report = verify_run(params)
    if values.json:
        from .answers import VerifyAnswer

        return reply(values, VerifyAnswer(ok=report.ok, lines=list(report.lines)))
    print(report)
    return int(not report.ok)


def prepare_run(params: RunParams, *, activations: bool = False) -> Prepared:
    """Check and plan a run, and return it. Raises ParamError for what stops a launch."""
    say(CHECKING)
    tell_of_hub(say)
    from ..train.prepare import prepare

    return prepare(params, activations=activations)


def pretrain(params: RunParams) -> None:
    """Pretrain the generated backbones if they are missing, with a progress bar."""
    from ..models.generated import needs_backbones

    if needs_backbones(params.model):
        from ..shapes.pretrain import ensure_backbones

        print("making generated weights, once; where backbones are pretrained, this takes minutes")
        ensure_backbones(params, progress=ProgressBar())


def show_finding(finding: Finding) -> None:
    """Print a finding of the lint on stderr."""
    message = f"{finding.level}: {finding.message}"
    print(textwrap.fill(message, WIDTH, subsequent_indent="  ", break_on_hyphens=False), file=sys.stderr)


def bench(values: Namespace) -> int:
    """Measure a step with `bench_NAME.py`, print its table, and write it to a JSON file."""
    if values.bench == "redraw":
        say("measuring: plans are made and drawn, and no ranks are started")
    elif values.bench == "panel":
        say("measuring: the metrics of a long run are written and drawn, and no ranks are started")
    else:
        say(f"measuring: `bench {values.bench}` runs each way to shard on real ranks, for a minute or more")
    import torch

    from ..train.handed_plan import versions

    name = values.bench
    module = import_module(f"mmfsdp.kit.bench.bench_{name}")
    options = {}
    for option in ("ranks", "rounds", "width", "samples", "preset", "rows"):
        if getattr(values, option, None) is not None:
            options[option] = getattr(values, option)
    result = getattr(module, f"bench_{name}")(**options)
    gpus = torch.cuda.device_count()
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "no GPU"
    numbers = ", ".join(f"{library} {number}" for library, number in versions().items())
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    result["machine"] = f"{cores}, {device}, load {os.getloadavg()[0]:.1f}; {numbers}; {date.today()}"
    print(f"{textwrap.fill(result['machine'], WIDTH)}\n{module.table(result)}")
    path = Path(f"bench_{name}.json")
    path.write_text(json.dumps(result, indent=1))
    print(f"written to {path}")
    return 0
