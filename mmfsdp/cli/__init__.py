"""The command line: `main` calls one of COMMANDS. Flags are the fields of RunParams; a file comes first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from ..params import ParamError, preset_names
from ..params.check import did_you_mean
from ..runs import refused
from ..runs.state import advice
from .bench import bench
from .follow import caption, watch
from .plan import plan
from .runs import cancel, drill, export, report, runs
from .start import launch, resume, run
from .sweep import sweep

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


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (plan, run, launch, runs, watch, cancel, sweep, drill, resume, caption, report, export, bench)
}
