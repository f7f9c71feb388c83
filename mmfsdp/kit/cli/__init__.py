"""The command line: `main` reads the words by argparse and calls the function of a command.

Flags are the fields of RunParams; a file comes first.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any, TextIO

from ...own.calls import OwnCodeError
from ...params import ParamError, TrackerKind, preset_names
from ...params.base import did_you_mean, without_controls
from ...params.enums import LAYOUTS
from ..check.check import WAIT_MIN
from ..run.error_kinds import error_words, kind_of
from ..run.files.reasons import ADVICE, UNKNOWN, Reason
from ..run.replay.replay import DEFAULT_SPEED
from . import interrupts
from .answers import CheckAnswer, NewAnswer, PlanAnswer, RunsAnswer, StatusAnswer, VerifyAnswer, WatchLine
from .arena import add_arena, arena
from .checking import check
from .course import add_course, course
from .fetching import fetch
from .flags import Parser, add_flags, read_words
from .json_output import Failure, Mistake, add_json, only_json, wants_json, write
from .looking import cancel, export, report, runs, status, watch
from .new import new
from .planning import bench, plan, verify
from .replaying import record, replay
from .running import caption, count, drill, launch, resume, run, sweep, track

ABOUT = "See, predict, run and measure FSDP training of mostly frozen multimodal models."
FLAGS = "`mmfsdp COMMAND --help` explains a command. C, of --config, is a YAML file or a preset: {presets}."
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
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", required=True)

    def add(call: Callable[[Namespace], int], about: str, *, usage: str) -> Parser:
        about_command = f"{about[0].upper()}{about[1:]}."
        name = call.__name__
        command = commands.add_parser(name, help=about, description=about_command, usage=f"mmfsdp {name} {usage}")
        command.set_defaults(call=call, parser=command)
        return command

    add_course(add)
    add_arena(add)
    _add_checks(add)
    _add_what_starts_runs(add)
    _add_what_looks_at_runs(add)
    _add_benches(add)
    return parser


def _add_checks(add: Callable[..., Parser]) -> None:
    """Add the commands that look for faults: of a machine or a cluster, and of a training."""
    about = "check this machine, or a cluster with a job of a minute; exit code 1 for an error"
    command = add(check, about, usage="[--cluster NAME] [--config C] [flags]")
    about = "check with a Slurm job of this profile: --launch.executor slurm --launch.cluster NAME"
    command.add_argument(
        "--cluster", metavar="NAME", dest="launch.cluster", default=SUPPRESS, action=_Cluster, help=about
    )
    about = f"minutes that the job may wait in the queue (default: {WAIT_MIN:g})"
    command.add_argument("--wait", type=count, default=WAIT_MIN, metavar="MIN", help=about)
    about = "add the measured bandwidth to this profile, for plans; without FILE, print it"
    command.add_argument("--write", nargs="?", const="", metavar="FILE", help=about)
    add_json(command, CheckAnswer)
    add_flags(command)

    command = add(verify, "check a training on two CPU ranks; exit code 1 for an error", usage="[--config C] [flags]")
    add_json(command, VerifyAnswer)
    add_flags(command)


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

    command = add(plan, "print what each rank will hold and send; start nothing", usage="[--config C] [flags]")
    command.add_argument(
        "--machine", metavar="NAME", help="also print the seconds of a step, and every mesh, on this machine"
    )
    add_json(command, PlanAnswer)
    add_flags(command)

    command = add(run, "plan, launch, watch, caption, report", usage="[--config C | --from RUN] [flags]")
    _add_from(command)
    _add_profile(command)
    add_flags(command)

    command = add(launch, "start the ranks and return", usage="[--config C | --from RUN] [flags]")
    _add_from(command)
    command.add_argument("--dry-run", action="store_true", help="print what sbatch would receive; start nothing")
    _add_profile(command)
    add_flags(command)

    command = add(
        fetch, "download a run's weights and data into the cache, for nodes without internet", usage="C [flags]"
    )
    command.add_argument("run_config", metavar="C", nargs="?", help="a YAML file or the name of a preset, as --config")
    add_flags(command)

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `mmfsdp` command. Returns the exit status: 0, 1 for a failed run, 2 for a person's mistake."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        # A pipe gets each line immediately; a letter that the terminal lacks must not stop a run.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        if not wants_json(words):
            return _status(words, None)
        with only_json() as stdout:
            return _status(words, stdout)
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _status(words: Sequence[str], stdout: TextIO | None) -> int:
    """Run a command, and return its exit status. stdout: where JSON goes, if the words ask for it."""
    try:
        values = _values(words)
        values.stdout = stdout
        status = values.call(values)
        sys.stdout.flush()
        return status
    except SystemExit as exit:  # after --help
        return int(exit.code or 0)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as interrupt:
        mistake = _interrupted(str(interrupt))
    except Exception as error:
        mistake = _mistake(words[0], error)
    if stdout is not None:
        write(stdout, Failure(ok=False, error=mistake))
    return mistake.exit_code


def _values(words: Sequence[str]) -> Namespace:
    """Return the values of a command's words. Raises ParamError for a mistake in them."""
    if words[0] not in (*COMMANDS, "-h", "--help"):
        raise ParamError("command", f"{words[0]!r} is not a command{did_you_mean(words[0], COMMANDS)}")
    return read_words(build_parser(), words)


def _interrupted(words: str) -> Mistake:
    """Tell of Ctrl-C in a line, and return it. words: what to tell, if the command knows more."""
    words = words or "interrupted"
    print(f"\nmmfsdp: {words}", file=sys.stderr)
    return Mistake(field="", message=words, kind="interrupted", exit_code=interrupts.EXIT_CODE)


def _mistake(command: str, error: Exception) -> Mistake:
    """Tell of an error on stderr, in a line if it is a person's to correct, and return it."""
    if interrupts.were_noted():  # an import that it ended halfway fails with an error of a library
        return _interrupted("")
    message = without_controls(error_words(error))
    reason = Reason(message, kind_of(error))
    # safetensors reports a full disk with an error of its own.
    is_known = isinstance(error, (ParamError, OSError)) or ADVICE.get(reason.kind, UNKNOWN).told
    if not is_known:  # a bug, whose traceback a person should see
        print(without_controls(traceback.format_exc()), file=sys.stderr)
        return Mistake(field="", message=f"{type(error).__name__}: {message}", kind="bug", exit_code=1)
    place = f"mmfsdp {command}" if command in COMMANDS else "mmfsdp"
    print(f"{place}: {reason}", file=sys.stderr)
    if isinstance(error, OwnCodeError) and error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    if isinstance(error, ParamError):
        return Mistake(field=error.field, message=error.message, kind=reason.kind, exit_code=2)
    return Mistake(field="", message=str(reason), kind=reason.kind, exit_code=2)


COMMANDS = [
    command.__name__
    for command in (
        *(
            check,
            course,
            arena,
            new,
            plan,
            verify,
            fetch,
            run,
            launch,
            runs,
            status,
            watch,
            cancel,
            sweep,
            drill,
            resume,
        ),
        *(track, caption, report, replay, record, export, bench),
    )
]
