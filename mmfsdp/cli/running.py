"""The commands over runs. They start them: run, launch, resume, sweep; or follow them: watch, drill, caption.

Others look at runs that exist already: runs, cancel, report, export.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Any

from ..params import LaunchParams, ParamError, RunParams
from ..params.base import read_yaml
from ..params.flags import Flags, count
from ..run.launch import Run, check
from ..run.launch import launch as start_run
from ..run.state import SWEEP_FILE, find_runs, runs_table
from ..run.sweep import Sweep, sweep_members
from ..run.sweep import sweep as start_sweep
from ..run.watch import bar
from ..run.watch import follow as lines_of
from .planning import check_plan, parse, print_plan, run_folder

SWEEP_HELP = """mmfsdp sweep [--config C] --grid FIELD=A,B ... [--at-once N] [flags]
    start a run for each combination, N at a time, and wait for all (Ctrl-C leaves them running); flags as for
    `mmfsdp launch`. launch.name names the sweep
    --grid FIELD=A,B FIELD=C,D   values to try; a list in brackets is YAML: data.more=[[], [{...}]]
mmfsdp sweep FOLDER              print its table
mmfsdp resume FOLDER/MEMBER      run a failed member again
mmfsdp cancel FOLDER             stop all its runs"""


def run(argv: list[str]) -> int:
    """Do it all in the foreground: plan, pretrain, launch, follow, caption, report."""
    params = parse("run", argv)
    check(params)  # before a minute of pretraining
    print_plan(params).check()
    prepare(params)
    started = start_run(params)
    print(f"run: {started.path}")
    return follow(started.path) or finish(started.path)


def launch(argv: list[str]) -> int:
    """Start the ranks and return; with `--dry-run`, print what sbatch would receive."""
    params = parse("launch", [word for word in argv if word != "--dry-run"])
    if "--dry-run" in argv:
        from ..run.slurm import sbatch_text  # imports submitit

        print(sbatch_text(params), end="")
        return 0
    check(params)
    check_plan(params)
    started = start_run(params)
    print(f"{started.path}: started; follow it with `mmfsdp watch {quote(str(started.path))}`")
    return 0


def resume(argv: list[str]) -> int:
    """Continue a run in its folder, from its newest complete checkpoint or from that of `--step`."""
    flags = Flags()
    flags.add_argument("--step", type=count)
    own, words = flags.parse_known_args(argv)
    resumed = Run.open(run_folder(words[:1]))
    params = parse("resume RUN", words[1:], default=resumed.params)
    if words[1:]:
        check_plan(params)  # these parameters may be other than those that ran
    resumed.resume(step=own.step, params=params)
    return follow(resumed.path) or finish(resumed.path)


def watch(argv: list[str]) -> int:
    """Follow a run."""
    return follow(run_folder(argv))


def drill(argv: list[str]) -> int:
    """Preempt a run as a cluster would, and follow it."""
    drilled = Run.open(run_folder(argv))
    drilled.drill()
    return follow(drilled.path)


def caption(argv: list[str]) -> int:
    """Caption new pictures with a finished run's checkpoint."""
    return finish(Run.open(run_folder(argv)).path)


def prepare(params: RunParams) -> None:
    """Pretrain the generated backbones if they are missing, with a progress bar."""
    from ..models.build import needs_backbones

    if needs_backbones(params.model):
        from ..train.pretrain import ensure_backbones

        def show(label: str, share: float) -> None:
            print(f"\r{label} {bar(share)}", end="\n" if share == 1 else "", flush=True)

        print("the preset's backbones are pretrained here, once: minutes, and later runs find them")
        ensure_backbones(params, progress=show)


def follow(folder: Path) -> int:
    """Print a run's lines until it ends. Returns 0 if it completed."""
    followed = Run.open(folder)
    try:
        for line in lines_of(followed.path):
            print(line)
    except KeyboardInterrupt:
        name = quote(str(folder))
        print(f"\n{followed.name} goes on; `mmfsdp watch {name}` follows it, `mmfsdp cancel {name}` ends it", end="")
        raise
    state = followed.state()
    print(f"{followed.name}: {state}")
    return 0 if state.ok else 1


def finish(folder: Path) -> int:
    """Caption held-out pictures, print five beside the truth, write result.json and the report."""
    from ..train.evaluate import caption_held_out
    from ..widgets.report import skipped_lines, write_report

    result = caption_held_out(folder)
    for row in result["captions"][:5]:
        mark = "=" if row["caption"] == row["truth"] else "x"
        print(f"  {mark} {row['caption']:<48} truth: {row['truth']}")
    for key, value in result.items():
        if isinstance(value, float):
            print(f"  {key}: {value:.3f}")
        elif not isinstance(value, (list, dict)):
            print(f"  {key}: {value}")
    for line in skipped_lines(result):
        print(f"  {line}")
    print(f"report: {write_report(folder)}")
    return 0


def sweep(argv: list[str]) -> int:
    """Start a sweep, or show one. Returns 1 if a member failed."""
    if not argv or argv[0] in ("-h", "--help"):
        print(SWEEP_HELP)
        return 0
    if not argv[0].startswith("-"):
        return show_members(Sweep.open(run_folder(argv)))
    params, own = read_sweep_words(argv)
    grid = dict(grid_values(text) for text in own.grid)
    check(params)
    different = {}  # members with the same plan are checked once
    for _, member in sweep_members(params, grid):
        different[repr((member.model, member.data, member.fsdp, member.launch.ranks))] = member
    for member in different.values():
        check_plan(member)
    prepare(params)
    started = start_sweep(params, grid=grid, at_once=own.at_once)
    print(f"{started.path}: {len(started.members)} runs, {own.at_once} at a time", flush=True)
    started.wait()
    return show_members(started)


def show_members(shown: Sweep) -> int:
    """Print the table of a sweep. Returns 1 if a member failed."""
    print(shown)
    return int(any(state.done and not state.ok for state in shown.states().values()))


def read_sweep_words(argv: list[str]) -> tuple[RunParams, Any]:
    """Return the shared parameters, and the options of the sweep: grid, at_once."""
    flags = Flags()
    flags.add_argument("--grid", nargs="+", action="extend", default=[])
    flags.add_argument("--at-once", type=count, default=1)
    own, words = flags.parse_known_args(argv)
    return parse("sweep", words), own


def grid_values(text: str) -> tuple[str, list[Any]]:
    """Return the field and the values of words such as `train.lr=1e-3,3e-4`. Raises ParamError."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise ParamError("grid", f"{text!r} is not FIELD=VALUE,VALUE, such as train.lr=1e-3,3e-4")
    if values.startswith("["):
        return field, read_yaml(values, name="grid")
    return field, [read_yaml(value, name="grid") for value in values.split(",")]


# ---- runs that exist already ----


def runs(argv: list[str]) -> int:
    """List all runs in the folders named, or in runs/."""
    default = LaunchParams().folder
    for folder in argv or [default]:
        paths = find_runs(folder)
        print(runs_table(paths) if paths else f"no runs in {folder}")
    return 0


def cancel(argv: list[str]) -> int:
    """Stop a run, every rank of it; or a sweep, every run of it."""
    path = run_folder(argv)
    if os.path.isfile(path / SWEEP_FILE):
        members = Sweep(path)
        members.cancel()
        print(members)
    else:
        cancelled = Run.open(path)
        print(f"{cancelled.name}: {cancelled.cancel()}")
    return 0


def report(argv: list[str]) -> int:
    """Write a run's report, or a page that compares runs."""
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

    if len(argv) not in (2, 3):
        raise ParamError("export", "usage: mmfsdp export RUN NEW_FOLDER [LAYOUT]")
    layout = {"layout": argv[2]} if len(argv) == 3 else {}
    print(write(Run.open(run_folder(argv[:1])).path, Path(argv[1]), **layout))
    return 0
