"""The command line: plan, run, launch, watch. Flags are the fields of RunParams; a file comes first, flags on top."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from .cli_runs import cancel, drill, list_runs, one_run
from .cli_sweep import sweep
from .params import ParamError, RunParams, preset_names
from .params.check import did_you_mean
from .runs import refused
from .runs.state import advice

if TYPE_CHECKING:
    from .plan import WrapPlan

USAGE = """mmfsdp: see, predict, run and measure FSDP training of mostly frozen multimodal models

  mmfsdp plan   [--config C] [flags]   print who shares a shard with whom, and what a step will hold and send; with
                                       --machine NAME seconds and every mesh, with --world-size N on so many ranks
  mmfsdp run    [--config C] [flags]   plan, launch, watch, caption new pictures, write the report; with --profile a
                                       trace of three steps for Perfetto, and how long they wait for communication
  mmfsdp launch [--config C] [flags]   start the ranks and return at once; --dry-run shows what sbatch would get
  mmfsdp runs   [FOLDER ...]           all runs: state, step, loss, age, where
  mmfsdp watch  RUN                    follow a run's log and progress, from any process
  mmfsdp cancel RUN                    stop every rank of a run
  mmfsdp sweep  [--help]               many runs over a grid of values, some at a time, and one table of results
  mmfsdp drill  RUN                    preempt a run as a cluster would, and see that it goes on
  mmfsdp resume RUN [--step N] [flags] go on with a run that ended early, its parameters changed by the flags
  mmfsdp caption RUN                   caption new pictures with a finished run's checkpoint, write the report
  mmfsdp report RUN [RUN ...]          write a run's report.html; of several, one page that compares them
  mmfsdp export RUN TO [LAYOUT]        a run's model, each part as its library loads it, or as open_flamingo does
  mmfsdp bench wrap [--help]           bytes, memory and seconds of a step, for ways to shard, ours and others'
  mmfsdp bench step [--help]           a step beside what its device can do, and beside other ways to wrap the model
  mmfsdp bench startup [--help]        imports, the form, launch() and the first step of a run, by part
  mmfsdp bench data [--help]           samples per second of every kind of source, beside loops written by hand
  mmfsdp bench launch [--help]         seconds until launch() returns, until its first line is seen, and lines' age
  mmfsdp bench form [--help]           seconds until the form is there, and until the plan follows a choice
  mmfsdp bench plan [--help]           CPU seconds of a plan: tiny, 9B, and 70B on 4,096 ranks
  mmfsdp bench checkpoint [--help]     what saving costs the training, while it waits and while it goes on
  mmfsdp bench parity [--help]         training on ranks beside one process, for every wrapper, strategy and policy
  mmfsdp bench stream [--help]         from a line that a rank writes to the page in a real browser; what a panel costs

C is a YAML file or a preset: {presets}.
Flags are dotted field names, such as --fsdp.sharding-strategy SHARD_GRAD_OP; `mmfsdp plan --help` lists them all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmfsdp` command. Returns the exit status: 0, 1 for a failed run, 2 for a mistake."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        # A pipe sees lines as they come; a letter that a terminal lacks must not stop a run.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    if command not in (*COMMANDS, "-h", "--help"):
        print(f"mmfsdp: {command!r} is no command{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status = COMMANDS[command](rest) if command in COMMANDS else usage()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except Exception as error:
        words = " ".join(str(error).split())
        # Of a full disk safetensors tells in an error of its own.
        hint = "" if isinstance(error, ParamError) else advice(words) or refused(error)
        if not (hint or isinstance(error, (ParamError, OSError))):  # no such file, a folder that is closed or read-only
            raise
        print(f"mmfsdp {command}: {words}{hint}", file=sys.stderr)
        return 2


def usage() -> int:
    """Print all commands."""
    print(USAGE.format(presets=", ".join(preset_names())))
    return 0


def parse(command: str, argv: list[str], *, default: RunParams | None = None) -> RunParams:
    """RunParams from `--config` (if it is there, first), else `default`, and flags on top; or exits with the help.

    Raises ParamError.
    """
    from .params.flags import read_words

    if "--profile" in argv:
        place = argv.index("--profile")
        argv[place : place + 1] = ["--train.profile", "3"]
    params, _ = read_words([word for word in argv if word not in ("-h", "--help")], default=default)
    if {"-h", "--help"} & set(argv):
        import tyro

        enums = (tyro.conf.EnumChoicesFromValues,)
        tyro.cli(RunParams, default=params, args=["--help"], prog=f"mmfsdp {command} [--config C]", config=enums)
    return params


def plan(argv: list[str]) -> int:
    """Print the plan and what it will cost; on a machine, how long a step takes and which mesh is best.

    Returns 1 where the lint found errors.
    """
    from .params.flags import number_taken, taken

    machine, ranks = taken(argv, "--machine"), number_taken(argv, "--world-size", "ranks")
    params = parse("plan", argv)
    if ranks:
        params = params.change(**{"launch.ranks": ranks})
    found = print_plan(params)
    if machine:
        print_times(params, *machine)
    return int(any(f.level == "error" for f in found.lint))


def print_times(params: RunParams, machine: str) -> None:
    """How long a step takes on one of estimate's machines, the cluster profile's figures first, and every mesh."""
    from .estimate import machine_of, mesh_table, meshes, step_time
    from .params import Backend
    from .params.cluster import read_cluster
    from .preview import preview

    plan, _ = preview(params)
    profile = read_cluster(params.launch.cluster).machine if params.launch.cluster else {}
    given = machine_of(machine, profile)
    if plan.refused:
        return
    print(step_time(plan, params.train, machine=given))
    if plan.backend is not Backend.DDP and plan.world_size > 1:
        print(mesh_table(meshes(plan, params.train, machine=given), given))


def print_plan(params: RunParams) -> WrapPlan:
    """Print the plan and its cost, and return it. Raises ParamError for what cannot be planned."""
    from .preview import preview

    plan, cost = preview(params)
    print(plan)
    print(cost)
    return plan


def check_plan(params: RunParams) -> None:
    """Print what the lint warns of. Raises ParamError for its errors: they stop a launch."""
    from .preview import check

    for finding in check(params).lint:
        print(f"{finding.level}: {finding.message}", file=sys.stderr)


def launch(argv: list[str]) -> int:
    """Start the ranks and return; with `--dry-run`, print what sbatch would receive."""
    from .launch import launch as start
    from .launch import sbatch_text
    from .launch.start import check

    if "--dry-run" in argv:
        print(sbatch_text(parse("launch", [a for a in argv if a != "--dry-run"])), end="")
        return 0
    params = parse("launch", argv)
    check(params)
    check_plan(params)
    run = start(params)
    print(f"{run.path}: started; follow it with `mmfsdp watch {quote(str(run.path))}`")
    return 0


def run(argv: list[str]) -> int:
    """The whole job in the foreground."""
    from .launch import launch as start
    from .launch.start import check

    began = time.time()
    params = parse("run", argv)
    check(params)  # before a minute of pretraining
    print_plan(params).check()
    prepare(params)
    started = start(params)
    print(f"run: {started.path}")
    if follow(started.path):
        return 1
    return finish(started.path, since=began)


def prepare(params: RunParams) -> None:
    """Pretrain the generated backbones where they are missing, with a progress bar."""
    from .build import needs_backbones

    if needs_backbones(params.model):
        from .pretrain import ensure_backbones
        from .watch import Bar

        print("the preset's backbones are pretrained here, once: minutes, and later runs find them")
        bar = Bar()
        ensure_backbones(params, progress=bar)
        bar.end()


def watch(argv: list[str]) -> int:
    """Follow a run."""
    return follow(one_run(argv))


def resume(argv: list[str]) -> int:
    """Go on with a run in its folder, from its newest complete checkpoint or an older one."""
    from .launch import Run
    from .params.flags import number_taken

    step = number_taken(argv, "--step", "steps")
    run = Run.open(one_run(argv[:1]))
    params = parse("resume RUN", argv[1:], default=run.params)
    if argv[1:]:
        check_plan(params)  # what was asked for may not be what has run
    run.resume(step=step, params=params)
    return 1 if follow(run.path) else finish(run.path)


def caption(argv: list[str]) -> int:
    """Caption new pictures with a finished run's checkpoint."""
    from .launch import Run

    return finish(Run.open(one_run(argv)).path)


def follow(folder: Path) -> int:
    """Print a run's lines until it ends. Returns 0 if it completed."""
    from .launch import Run
    from .watch import follow as lines

    run = Run.open(folder)
    try:
        for line in lines(run.path):
            print(line)
    except KeyboardInterrupt:
        print(f"\n{run.name} goes on; `mmfsdp watch {folder}` follows it, `mmfsdp cancel {folder}` ends it", end="")
        raise
    state = run.state()
    print(f"{run.name}: {state}")
    return 0 if state.ok else 1


def finish(folder: Path, *, since: float | None = None) -> int:
    """Caption held-out pictures, print five beside the truth, write result.json and the report."""
    from .evaluate import caption_held_out
    from .launch import Run
    from .report import write_report

    Run(folder).own()  # rather than after minutes
    result = caption_held_out(folder, since=since)
    for row in result["captions"][:5]:
        print(f"  {'=' if row['caption'] == row['truth'] else 'x'} {row['caption']:<48} truth: {row['truth']}")
    for key, value in result.items():
        if not isinstance(value, (list, dict)):
            print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")
    for row in result.get("skipped", {}).values():
        if row["times"] or row["cut"]:
            print(f"  {row['path']}: {row['records']} records skipped, {row['cut']} texts cut to data.max_length")
    print(f"report: {write_report(folder)}")
    return 0


def report(argv: list[str]) -> int:
    """Write a run's report, or a page of runs compared."""
    from .report import write_comparison, write_report
    from .report.html import writable

    paths = [one_run([name]) for name in argv] or [one_run(argv)]
    if len(paths) == 1:
        from .launch import Run

        print(write_report(Run.open(paths[0]).path))
        return 0
    print(write_comparison(paths, writable(paths[0].absolute().parent / "comparison.html")))
    return 0


def export(argv: list[str]) -> int:
    """Write a run's weights for others."""
    from .export import export as write
    from .launch import Run

    if not 2 <= len(argv) <= 3:
        raise ParamError("export", "takes a run folder, a new folder, and perhaps a layout")
    print(write(Run.open(one_run(argv[:1])).path, Path(argv[1]), **({"layout": argv[2]} if argv[2:] else {})))
    return 0


BENCHES = {
    name: f"bench_{name}"
    for name in ("checkpoint", "data", "form", "launch", "parity", "plan", "startup", "step", "stream", "wrap")
}


def bench(argv: list[str]) -> int:
    """Measure. Returns 1 where something is not as it must be."""
    import json
    from importlib import import_module

    import tyro

    from .bench import machine

    name, *flags = argv or [""]
    if name not in BENCHES:
        raise ParamError("bench", f"{name!r} is no bench; choose {', '.join(BENCHES)}")
    module = import_module(f".bench.{name}", __package__)
    found = tyro.cli(getattr(module, BENCHES[name]), args=flags, prog=f"mmfsdp bench {name}")
    here = machine()
    print(f"{here}\n{module.table(found)}")
    rows = {"machine": here} | ({"rows": found} if isinstance(found, list) else found)
    files = {"json": json.dumps(rows, indent=1)} | ({"svg": module.picture(found)} if name == "wrap" else {})
    for ending, text in files.items():
        Path(f"bench_{name}.{ending}").write_text(text)
        print(f"written to bench_{name}.{ending}")
    return int(name == "parity" and not all(row["ok"] for row in found))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan,
    "run": run,
    "launch": launch,
    "runs": list_runs,
    "watch": watch,
    "sweep": sweep,
    "cancel": cancel,
    "drill": drill,
    "resume": resume,
    "caption": caption,
    "report": report,
    "export": export,
    "bench": bench,
}


if __name__ == "__main__":
    sys.exit(main())
