"""build_parser: the commands of `mmfsdp` with their words, their help and the functions that they call."""

from __future__ import annotations

import platform
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from ...params import TrackerKind, preset_names
from ...params.enums import FIT_FOR, LAYOUTS
from ..check.check import WAIT_MIN
from ..run.replay.replay import DEFAULT_SPEED
from .answers import CheckAnswer, FitAnswer, NewAnswer, PlanAnswer, RunsAnswer, StatusAnswer, VerifyAnswer, WatchLine
from .arena import add_arena, arena
from .checking import check, fetch
from .course import add_course, course
from .flags import Parser, add_flags
from .json_output import add_json
from .looking import cancel, export, report, runs, status, watch
from .new import new
from .planning import bench, fit, gibibytes, plan, verify
from .running import caption, count, drill, launch, record, replay, resume, run, sweep, track

ABOUT = "See, predict, run and measure FSDP training of mostly frozen multimodal models."
FLAGS = (
    "`mmfsdp COMMAND --help` explains a command. C is a YAML file or a preset: {presets}.\n"
    "Begin with `mmfsdp plan tiny`."
)
EXAMPLES = {
    "plan": (
        "plan tiny",
        "plan openflamingo_9b --launch.ranks 16 --machine h100-infiniband",
        "plan my.yaml --fsdp.frozen-policy AUTO --fsdp.memory-budget-gib 40",
        "plan my.yaml --all-data",
    ),
    "fit": (
        "fit openflamingo_9b --machine rtx4090-pcie",
        "fit my.yaml --machine a100-nvlink --for batch gpus policy",
    ),
    "run": ("run tiny --train.steps 20", "run my.yaml --launch.name first --train.lr 1e-4"),
    "launch": ("launch tiny", "launch my.yaml --launch.executor slurm --launch.cluster lab --dry-run"),
    "verify": ("verify tiny", "verify my.yaml --fsdp.backend FSDP1"),
    "check": ("check", "check my.yaml --cluster lab"),
    "fetch": ("fetch my.yaml",),
    "sweep": ("sweep --config tiny --grid train.lr=1e-4,3e-4 train.steps=60", "sweep runs/tiny-sweep"),
    "new": ("new my.yaml --pictures my_data", "new my.yaml --pictures rows.jsonl --model org/name"),
}
"""Commands to begin with, by the command whose --help shows them."""
RUN = "the folder of a run, or the name of one in runs/"
ONE_RUN = {
    watch: "follow the log and progress of a run, from any process",
    status: "print the state of a run, what it does now, and what is wrong with it",
    drill: "preempt a run as a cluster would, and follow it",
    caption: "caption new pictures with a finished run's checkpoint, and write the report",
}
"""Commands whose only word is a run."""


def build_parser() -> Parser:
    """Return the parser of all commands. The values that it returns have the command's function as `call`."""
    parser = Parser(prog="mmfsdp", description=ABOUT, epilog=FLAGS.format(presets=", ".join(preset_names())))
    parser.add_argument("--version", action="version", version=version_words(), help="print the version, and exit")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)

    def add(call: Callable[[Namespace], int], about: str, *, usage: str) -> Parser:
        about_command = f"{about[0].upper()}{about[1:]}."
        name = call.__name__
        examples = "\n".join(["examples:", *(f"  mmfsdp {words}" for words in EXAMPLES.get(name, ()))])
        command = commands.add_parser(
            name,
            help=about,
            description=about_command,
            usage=f"mmfsdp {name} {usage}",
            epilog=examples if name in EXAMPLES else None,
        )
        command.set_defaults(call=call, parser=command)
        parser.commands[name] = command
        return command

    add_course(add)
    add_arena(add)
    _add_checks(add)
    _add_what_starts_runs(add)
    _add_what_looks_at_runs(add)
    _add_benches(add)
    return parser


def version_words() -> str:
    """Return the version, and which copy of the package and which Python it is."""
    return f"mmfsdp {__version__} from {Path(__file__).resolve().parents[2]}, Python {platform.python_version()}"


def _add_checks(add: Callable[..., Parser]) -> None:
    """Add the commands that look for faults: of a machine or a cluster, and of a training."""
    about = "check this machine, or a cluster with a job of a minute; exit code 1 for an error"
    command = add(check, about, usage="[C] [--cluster NAME] [flags]")
    about = "check with a Slurm job of this profile: --launch.executor slurm --launch.cluster NAME"
    command.add_argument(
        "--cluster", metavar="NAME", dest="launch.cluster", default=SUPPRESS, action=_Cluster, help=about
    )
    about = f"minutes that the job may wait in the queue (default: {WAIT_MIN:g})"
    command.add_argument("--wait", type=count, default=WAIT_MIN, metavar="MIN", help=about)
    about = "add the measured bandwidth to this profile, for plans; without FILE, print it"
    command.add_argument("--write", nargs="?", const="", metavar="FILE", help=about)
    add_json(command, CheckAnswer)
    add_flags(command, takes_config=True)

    command = add(verify, "check a training on two CPU ranks; exit code 1 for an error", usage="[C] [flags]")
    add_json(command, VerifyAnswer)
    add_flags(command, takes_config=True)


class _Cluster(Action):
    """Chooses the profile of a cluster, and Slurm with it."""

    def __call__(self, parser: object, namespace: Namespace, values: Any, option_string: object = None) -> None:
        setattr(namespace, "launch.executor", "slurm")
        setattr(namespace, "launch.cluster", values)


def _add_what_starts_runs(add: Callable[..., Parser]) -> None:
    """Add the commands that take the parameters of a run as flags, and the one that writes them."""
    usage = "FILE --pictures PATH\n                  [--vision DIR --language DIR | --model NAME]"
    command = add(new, "inspect your data, and write a configuration that trains on it", usage=usage)
    command.add_argument("file", metavar="FILE", help="the YAML file to write; it must not exist")
    about = "your data: a folder of pictures, a file of rows, shards, or the name of a data set of the hub"
    command.add_argument("--pictures", metavar="PATH", required=True, help=about)
    command.add_argument("--vision", metavar="DIR", help="a vision encoder of transformers: a folder, or its hub name")
    command.add_argument(
        "--language", metavar="DIR", help="a language model of transformers: a folder, or its hub name"
    )
    command.add_argument(
        "--model", metavar="NAME", help="a complete vision-language model of transformers: a folder, or its hub name"
    )

    add_json(command, NewAnswer)

    _add_plan(add)
    _add_fit(add)

    command = add(run, "plan, launch, watch, caption, report", usage="[C | --from RUN] [flags]")
    _add_from(command)
    _add_profile(command)
    add_flags(command, takes_config=True)

    command = add(launch, "start the ranks and return", usage="[C | --from RUN] [flags]")
    _add_from(command)
    command.add_argument("--dry-run", action="store_true", help="print what sbatch would receive; start nothing")
    _add_profile(command)
    add_flags(command, takes_config=True)

    command = add(
        fetch, "download a run's weights and data into the cache, for nodes without internet", usage="C [flags]"
    )
    add_flags(command, takes_config=True)

    usage = "[--config C] --grid FIELD=A,B ... [flags]\n       mmfsdp sweep FOLDER"
    command = add(sweep, "start a run for each combination of values, or show a sweep", usage=usage)
    command.add_argument("sweep", metavar="FOLDER", nargs="?", help="the folder of a sweep: print its table")
    command.add_argument(
        "--grid",
        metavar="FIELD=A,B",
        nargs="+",
        action="extend",
        default=[],
        help="values to try; a list in brackets is YAML: data.more=[[], [{...}]]. launch.name names the sweep",
    )
    command.add_argument("--at-once", type=count, default=1, metavar="N", help="runs at a time (default: 1)")
    add_flags(command)

    command = add(resume, "continue a run that ended early", usage="RUN [--step N] [--trust] [--fresh-code] [flags]")
    command.add_argument("run", metavar="RUN", help=RUN)
    command.add_argument("--step", type=count, metavar="N", help="from the checkpoint of this step, not the newest")
    _add_trust(command)
    command.add_argument(
        "--fresh-code", action="store_true", help="use your own code as it is now, not as it was at the launch"
    )
    add_flags(command)


def _add_plan(add: Callable[..., Parser]) -> None:
    """Add `mmfsdp plan`."""
    command = add(plan, "print what each rank will hold and send; start nothing", usage="[C] [flags]")
    command.add_argument(
        "--machine", metavar="NAME", help="also print the seconds of a step, and every mesh, on this machine"
    )
    about = "look at the text and the picture headers of every record of the data, however long it takes"
    command.add_argument("--all-data", action="store_true", help=about)
    add_json(command, PlanAnswer)
    add_flags(command, takes_config=True)


def _add_fit(add: Callable[..., Parser]) -> None:
    """Add `mmfsdp fit`."""
    usage = "[C] (--machine NAME | --memory GIB)\n                  [--for SIZE ...] [flags]"
    command = add(fit, "find the largest batch, or the fewest GPUs, that fits; start nothing", usage=usage)
    command.add_argument("--machine", metavar="NAME", help="the machine, of those of `mmfsdp plan`: rtx4090-pcie, ...")
    about = "another GPU: its memory in GiB, as torch reports it (23.6 of a card of 24 GB)"
    command.add_argument("--memory", type=gibibytes, metavar="GIB", help=about)
    about = f"solve for {', '.join(FIT_FOR)}; the others stay as set (default: batch)"
    command.add_argument("--for", dest="asked", nargs="+", choices=FIT_FOR, default=[], metavar="SIZE", help=about)
    add_json(command, FitAnswer)
    add_flags(command, takes_config=True)


def _add_what_looks_at_runs(add: Callable[..., Parser]) -> None:
    """Add the commands that take runs."""
    command = add(runs, "list runs: state, step, loss, age, where", usage="[FOLDER ...]")
    command.add_argument("folders", metavar="FOLDER", nargs="*", help="folders of runs (default: runs)")
    add_json(command, RunsAnswer)

    add(cancel, "stop every rank of a run, or every run of a sweep", usage="RUN").add_argument(
        "run", metavar="RUN", help=RUN
    )
    for call, about in ONE_RUN.items():
        command = add(call, about, usage="RUN [--best] [--trust]" if call is caption else "RUN")
        command.add_argument("run", metavar="RUN", help=RUN)
        if call is status:
            add_json(command, StatusAnswer)
        if call is watch:
            about = "print an object of JSON on each line, for programs; the last one is that of `mmfsdp status --json`"
            add_json(command, WatchLine, StatusAnswer, about=about)
        if call is caption:
            _add_best(command)
            _add_trust(command)

    command = add(track, "send a run's metrics to TensorBoard or W&B until it is done", usage="RUN [--to KIND ...]")
    command.add_argument("run", metavar="RUN", help=f"{RUN}, or of a sweep")
    kinds = [kind.value for kind in TrackerKind]
    text = f"{', '.join(kinds)} (default: the run's own, of train.trackers)"
    command.add_argument("--to", metavar="KIND", nargs="+", choices=kinds, default=[], help=text)

    command = add(report, "write a run's report.html, or a page that compares runs", usage="RUN [RUN ...]")
    command.add_argument("runs", metavar="RUN", nargs="+", help=RUN)

    command = add(replay, "play a recorded run again, without its ranks", usage="[RECORDING] [--to RUN] [--speed N]")
    about = "preemption, hang or out_of_memory, the file of a recording, or the folder of a run (default: list them)"
    command.add_argument("recording", metavar="RECORDING", nargs="?", help=about)
    command.add_argument("--to", metavar="RUN", help="the run folder to write (default: runs/NAME-replay)")
    about = f"times as fast as it was recorded (default: {DEFAULT_SPEED:g})"
    command.add_argument("--speed", type=float, default=DEFAULT_SPEED, metavar="N", help=about)

    command = add(record, "make a recording of a run, a small file without weights", usage="RUN TO --about WORDS")
    command.add_argument("run", metavar="RUN", help=RUN)
    command.add_argument("to", metavar="TO", help="the file to write, such as hang.jsonl; it must not exist")
    about = "on which machine the run was made; every replay shows this: '2 ranks on one laptop, CPU, gloo'"
    command.add_argument("--about", metavar="WORDS", required=True, help=about)

    command = add(
        export, "export a run's model for other libraries", usage="RUN TO [LAYOUT] [--best] [--ema] [--trust]"
    )
    command.add_argument("run", metavar="RUN", help=RUN)
    _add_best(command)
    command.add_argument("--ema", action="store_true", help="the moving average of the weights, of train.ema")
    _add_trust(command)
    command.add_argument("to", metavar="TO", help="a folder that does not exist yet")
    command.add_argument(
        "layout", metavar="LAYOUT", nargs="?", choices=LAYOUTS, default=LAYOUTS[0], help=", ".join(LAYOUTS)
    )


def _add_benches(add: Callable[..., Parser]) -> None:
    """Add `mmfsdp bench` with its benches."""
    command = add(bench, "measure ways to shard a model on this machine", usage="{wrap,step,redraw,panel} [--help]")
    benches = command.add_subparsers(metavar="BENCH", title="benches", required=True, prog="mmfsdp bench")
    for name, about in (
        ("wrap", "bytes, memory and seconds of a step, by several ways to shard"),
        ("step", "a step compared with what its device can do, by several ways to shard"),
    ):
        one = benches.add_parser(name, help=about, description=f"Measure {about}.")
        one.set_defaults(bench=name, parser=one)
        one.add_argument("--ranks", type=count, metavar="N", help="processes (default: one a GPU, else 2)")
        one.add_argument("--rounds", type=count, metavar="N", help="timed steps (default: 7)")
        if name == "wrap":
            one.add_argument("--width", type=count, metavar="N", help="of the language model (default: 512)")
        else:
            one.add_argument("--samples", type=count, metavar="N", help="of a rank (default: as in the preset)")
    about = "the time from a changed choice to the plan's page"
    redraw = benches.add_parser("redraw", help=about, description=f"Measure {about}.")
    redraw.set_defaults(bench="redraw", parser=redraw)
    redraw.add_argument("--preset", metavar="NAME", help="to plan (default: openflamingo_9b)")
    redraw.add_argument("--ranks", type=count, metavar="N", help="of the plan (default: 64)")
    about = "the time from a question of a run's page to its answer"
    panel = benches.add_parser("panel", help=about, description=f"Measure {about}.")
    panel.set_defaults(bench="panel", parser=panel)
    panel.add_argument("--rows", type=count, metavar="N", help="steps of the run (default: 100,000)")
    panel.add_argument("--rounds", type=count, metavar="N", help="times that each is asked (default: 20)")


def _add_best(command: Parser) -> None:
    """Add --best."""
    command.add_argument("--best", action="store_true", help="the checkpoint that train.keep_best kept, not the newest")


def _add_trust(command: Parser) -> None:
    """Add --trust."""
    command.add_argument(
        "--trust", action="store_true", help="execute what the folder names, even if another user wrote it"
    )


def _add_from(command: Parser) -> None:
    """Add --from."""
    about = "start a new stage: with the weights of this run, and its parameters where no flag says otherwise"
    command.add_argument("--from", dest="start", default=SUPPRESS, metavar="RUN", help=about)


def _add_profile(command: Parser) -> None:
    """Add the short form of --train.profile 3."""
    command.add_argument(
        "--profile",
        dest="train.profile",
        action="store_const",
        const=3,
        default=SUPPRESS,
        help="record three steps for Perfetto, and how long they wait for communication",
    )


COMMANDS = [
    command.__name__
    for command in (
        *(check, course, arena, new, plan, fit, verify, fetch, run, launch, runs, status, watch, cancel, sweep, drill),
        *(resume, track, caption, report, replay, record, export, bench),
    )
]
