"""The commands that start runs, follow them to their end, and play them again.

run, launch, resume, sweep, track, drill, caption, replay, record.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from shlex import quote
from typing import Any

from ...params import ParamError, RunParams, TrackerKind
from ...params.base import read_yaml, without_controls
from ...params.findings import UNKNOWN_WORDS
from ..run.files.snapshot import Snapshot
from ..run.handle import Run
from ..run.hub_cache import tell_of_hub
from ..run.launch import launch as start_run
from ..run.launchers.registry import check_no_replay, launcher_for
from ..run.rank_count import trains_on, with_ranks
from ..run.replay.anonymous_recording import record as make_recording
from ..run.replay.recording import Recording, shipped
from ..run.replay.replay import replay as start_replay
from ..run.start import free_name, runs_folder
from ..run.sweep import Sweep
from ..run.sweep import sweep as start_sweep
from ..run.trouble import headline, troubles
from ..run.trust import UntrustedRun, check_trusted, own_code_of
from ..run.watch import follow as lines_of
from .flags import params_of
from .planning import CHECKING, chosen_params, prepare_run, run_folder, say, show_finding


def count(text: str) -> int:
    """Return the number from 1 that a flag gives; argparse words the error."""
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def show(*texts: object) -> None:
    """Print texts of a run, a line each, without what a terminal would obey: somebody else may have written them."""
    for text in texts:
        print(without_controls(str(text)))


def run(values: Namespace) -> int:
    """Do it all in the foreground: check, plan, launch, follow, caption, report."""
    params = stage_params(values)
    run_prepared = prepare_run(params, activations=True)
    print(run_prepared.plan)
    print(run_prepared.cost)
    started = start_run(run_prepared)
    print(f"run: {started.path}\n{trains_on(params)}")
    return follow(started.path) or finish(started.path)


def launch(values: Namespace) -> int:
    """Start the ranks and return; with `--dry-run`, print what sbatch would receive."""
    params = stage_params(values)
    if values.dry_run:
        return dry_run(params)
    say(CHECKING)
    tell_of_hub(say)
    started = start_run(params, tell=show_finding)
    print(f"{started.path}: started; follow it with `mmfsdp watch {quote(str(started.path))}`\n{trains_on(params)}")
    return 0


def stage_params(values: Namespace) -> RunParams:
    """Return the parameters of a run to start; with `--from RUN`, those of that run, whose weights it begins with.

    The flags change them; --config takes their place.
    """
    if not hasattr(values, "start"):
        return chosen_params(values)
    start = run_folder(values.start)
    is_checkpoint = start.parent.name == "checkpoints"
    parent = Run.open(start.parent.parent if is_checkpoint else start)
    check_no_replay(parent.path, "continued by another run")
    launch = parent.params.launch
    name = free_name(runs_folder(launch), launch.name)
    changes = {"launch.name": name, "launch.replace": False, "train.start_from": None, "train.start_adapters": "keep"}
    setattr(values, "train.start_from", str(start.absolute()))
    return params_of(values, default=parent.params.change(**changes))


def dry_run(params: RunParams) -> int:
    """Print what sbatch would receive and, on stderr, what the job asks for and when Slurm would start it."""
    from ..run.slurm.site import settled

    params = settled(params)
    text, lines = launcher_for(params).dry_run(params)
    print(text, end="", flush=True)
    print(file=sys.stderr)  # the batch file has no line end at its end
    for line in lines:
        print(without_controls(line), file=sys.stderr)
    return 0


def resume(values: Namespace) -> int:
    """Continue a run in its folder, from its newest complete checkpoint or from the one of `--step`.

    With `--trust`, also one that somebody else may have made or changed. With `--fresh-code`, the own code is that of
    the current folder, not the copy of the launch.
    """
    resumed = Run.open(run_folder(values.run))
    check_no_replay(resumed.path, "resumed")
    params = resumed.with_own_ranks(params_of(values, default=resumed.with_own_ranks(resumed.params)))
    if not values.trust:
        try:
            check_trusted(resumed.path, params)
        except UntrustedRun as error:
            raise shown(error, resumed.path) from None
    say(CHECKING)
    tell_of_hub(say)
    resumed.resume(step=values.step, params=params, trust=values.trust, fresh_code=values.fresh_code, tell=show_finding)
    show(trains_on(params))
    return follow(resumed.path) or finish(resumed.path)


def shown(error: UntrustedRun, folder: Path) -> ParamError:
    """Print what an untrusted run would execute, and return the error that ends the command."""
    show(f"{folder} would run:", *(f"  {line}" for line in error.lines))
    return ParamError("run", f"{error.why}; read the lines above, then add --trust")


def opened(values: Namespace) -> Run:
    """Return the run that a command reads samples of, or loads the model of.

    Raises ParamError for one with own code that somebody else may have written, without `--trust`.
    """
    run = Run.open(run_folder(values.run))
    if values.trust:
        return run.trust()
    try:
        with own_code_of(run.path, run.params):
            return run
    except UntrustedRun as error:
        raise shown(error, run.path) from None


def track(values: Namespace) -> int:
    """Hand the metrics of a run, or of a sweep's runs, to trackers until they are done."""
    from ..run.trackers.track import runs_in
    from ..run.trackers.track import track as hand_over

    folder = run_folder(values.run)
    kinds = values.to or Run.open(runs_in(folder)[0]).params.train.trackers
    if not kinds:
        raise ParamError("--to", f"is needed, since train.trackers of this run names none; {', '.join(TrackerKind)}")
    say(f"following {folder} until it is done: {', '.join(kinds)}")
    hand_over(folder, [TrackerKind(kind) for kind in kinds])
    for kind in kinds:
        print(TrackerKind(kind).view.format(folder=folder))
    return 0


def drill(values: Namespace) -> int:
    """Preempt a run as a cluster would, and follow it."""
    drilled = Run.open(run_folder(values.run))
    drilled.drill()
    return follow(drilled.path)


def caption(values: Namespace) -> int:
    """Caption new pictures with a finished run's checkpoint."""
    return finish(opened(values).path, best=values.best)


def follow(folder: Path) -> int:
    """Print a run's lines until it ends. Returns 0 if it completed."""
    followed = Run.open(folder)
    try:
        for line in lines_of(followed.path):
            show(line)
    except KeyboardInterrupt:
        name = quote(str(folder))
        words = f"{followed.name} goes on; `mmfsdp watch {name}` follows it, `mmfsdp cancel {name}` ends it"
        raise KeyboardInterrupt(words) from None
    state = followed.state()
    show(f"{followed.name}: {headline(state, troubles(followed.path, state))}")
    return 0 if state.ok else 1


def finish(folder: Path, *, best: bool = False) -> int:
    """Caption held-out pictures, print five next to the truth, write result.json and the report.

    best: with the checkpoint that `train.keep_best` kept.
    """
    say("captioning held-out pictures")
    from ..train.evaluate import caption_held_out
    from ..widgets.report import skipped_lines, write_report

    result = caption_held_out(folder, best=best)
    for notice in Snapshot(folder).notices:
        if notice.code == UNKNOWN_WORDS and result["captions"]:
            show(f"  {notice}")
    for row in result["captions"][:5]:
        mark = "=" if row["caption"] == row["truth"] else "x"
        show(f"  {mark} {row['caption']}", f"    truth: {row['truth']}")
    for key, value in result.items():
        if key == "no_captions":
            show(f"  {value}")
        elif isinstance(value, float):
            show(f"  {key}: {value:.3f}")
        elif not isinstance(value, (list, dict)):
            show(f"  {key}: {value}")
    for line in skipped_lines(result):
        show(f"  {line}")
    show(f"report: {write_report(folder)}")
    return 0


def sweep(values: Namespace) -> int:
    """Start a sweep, or show one. Returns 1 if a member failed."""
    if values.sweep:
        if values.grid:
            raise ParamError("grid", f"belongs to a new sweep, not to {values.sweep}; leave one of the two out")
        return show_members(Sweep.open(run_folder(values.sweep)))
    if not values.grid:
        raise ParamError("grid", "is missing; a sweep needs --grid FIELD=A,B, or the FOLDER of one to show")
    grid: dict[str, list[Any]] = {}
    for text in values.grid:
        field, choices = grid_values(text)
        if field in grid:
            raise ParamError("grid", f"{field} is there twice; write {field}=A,B")
        grid[field] = choices
    chosen = chosen_params(values)
    say(CHECKING)
    tell_of_hub(say)
    params = with_ranks(chosen)
    started = start_sweep(params, grid=grid, at_once=values.at_once, tell=show_finding)
    print(f"{started.path}: {len(started.members)} runs, {values.at_once} at a time\n{trains_on(chosen)}", flush=True)
    started.wait()
    return show_members(started)


def show_members(shown: Sweep) -> int:
    """Print the table of a sweep. Returns 1 if a member failed."""
    show(shown)
    return int(any(state.done and not state.ok for state in shown.states().values()))


def grid_values(text: str) -> tuple[str, list[Any]]:
    """Return the field and the values of words such as `train.lr=1e-3,3e-4`. Raises ParamError."""
    field, equals, values = text.partition("=")
    if not equals or not values:
        raise ParamError("grid", f"{text!r} is not FIELD=VALUE,VALUE, such as train.lr=1e-3,3e-4")
    if values.startswith("["):
        return field, read_yaml(values, name="grid")
    return field, [read_yaml(value, name="grid") for value in values.split(",")]


def replay(values: Namespace) -> int:
    """Play a recorded run and follow it; without a recording, list those of the package."""
    if values.recording is None:
        for name, path in shipped().items():
            show(f"{name}: {Recording.read(path).about}")
        return 0
    played = start_replay(values.recording, to=values.to, speed=values.speed)
    words = f"a replay, {values.speed:g} times as fast; in a notebook, `RunPanel({str(played.path)!r})` shows it"
    show(f"{played.path}: {words}")
    follow(played.path)
    return 0  # the replay has worked, whatever became of the recorded run


def record(values: Namespace) -> int:
    """Make a recording of a run that has ended."""
    path = make_recording(Run.open(run_folder(values.run)).path, values.to, about=values.about)
    show(f"{path}: {path.stat().st_size:,} bytes; play it with `mmfsdp replay {quote(str(path))}`")
    show("read it before you publish it: the output of your own code may contain names of people or places")
    return 0
