"""The command line: `main` calls one of COMMANDS. Flags are the fields of RunParams; a file comes first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper

from ..params import ParamError, preset_names
from ..params.base import did_you_mean
from ..run.record import advice
from .planning import bench, plan
from .running import cancel, caption, drill, export, launch, report, resume, run, runs, sweep, watch

USAGE = """mmfsdp: see, predict, run and measure FSDP training of mostly frozen multimodal models

  mmfsdp plan   [--config C] [flags]   print the units, and what each rank holds and sends in a step; --machine NAME
                                       adds seconds and every mesh, --launch.ranks N plans for N ranks
  mmfsdp run    [--config C] [flags]   plan, launch, watch, caption new pictures, write the report; --profile records
                                       three steps for Perfetto, and how long they wait for communication
  mmfsdp launch [--config C] [flags]   start the ranks and return at once; --dry-run prints what sbatch would receive
  mmfsdp runs   [FOLDER ...]           list runs: state, step, loss, age, where
  mmfsdp watch  RUN                    follow a run's log and progress, from any process
  mmfsdp cancel RUN                    stop every rank of a run
  mmfsdp sweep  [--help]               start runs over a grid of values, some at a time, and print a table of results
  mmfsdp drill  RUN                    preempt a run as a cluster would, and follow it
  mmfsdp resume RUN [--step N] [flags] continue a run that ended early, its parameters changed by the flags
  mmfsdp caption RUN                   caption new pictures with a finished run's checkpoint, write the report
  mmfsdp report RUN [RUN ...]          write a run's report.html, or one page that compares several
  mmfsdp export RUN TO [LAYOUT]        write a run's model as its libraries load it, as an adapter, or as open_flamingo
  mmfsdp bench wrap [--help]           measure bytes, memory and seconds of a step, for several methods to shard
  mmfsdp bench step [--help]           compare a step with what its device can do, and with other methods

C is a YAML file or a preset: {presets}.
Flags are dotted field names, such as --fsdp.sharding-strategy SHARD_GRAD_OP; `mmfsdp plan --help` lists them all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `mmfsdp` command. Returns the exit status: 0, 1 for a failed run, 2 for a person's mistake."""
    command, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, TextIOWrapper):
        # A pipe gets each line at once; a letter that the terminal lacks must not stop a run.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    if command not in (*COMMANDS, "-h", "--help"):
        print(f"mmfsdp: {command!r} is not a command{did_you_mean(command, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        if command not in COMMANDS:
            print(USAGE.format(presets=", ".join(preset_names())))
            return 0
        status = COMMANDS[command](words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except Exception as error:
        message = " ".join(str(error).split())
        hint = advice(message)  # safetensors reports a full disk with an error of its own
        if not (hint or isinstance(error, (ParamError, OSError))):
            raise  # a bug, of which a person should see the traceback
        print(f"mmfsdp {command}: {message}{hint}", file=sys.stderr)
        return 2


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (plan, run, launch, runs, watch, cancel, sweep, drill, resume, caption, report, export, bench)
}
