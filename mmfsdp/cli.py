"""The command line: plan, run, launch, watch. Flags are the fields of RunParams; a file comes first, flags on top."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .params import ParamError, RunParams, load, preset_names

USAGE = """mmfsdp: see, predict, run and measure FSDP training of mostly frozen multimodal models

  mmfsdp plan   [--config C] [flags]   print who shares a shard with whom, and what a step will hold and send
  mmfsdp run    [--config C] [flags]   plan, launch, watch, caption new pictures, write the report
  mmfsdp launch [--config C] [flags]   start the ranks and return at once
  mmfsdp watch  RUN                    follow a run's log and progress, from any process
  mmfsdp caption RUN                   caption new pictures with a finished run's checkpoint, write the report

C is a YAML file or a preset: {presets}.
Flags are dotted field names, such as --fsdp.sharding-strategy SHARD_GRAD_OP; `mmfsdp plan --help` lists them all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmfsdp` command. Returns the exit status: 0, 1 for a failed run, 2 for a mistake."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE.format(presets=", ".join(preset_names())))
        return 0
    if command not in COMMANDS:
        print(f"mmfsdp: {command!r} is no command; choose {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[command](rest)
    except (ParamError, FileNotFoundError, FileExistsError) as error:
        print(f"mmfsdp {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130


def parse(command: str, argv: list[str]) -> RunParams:
    """RunParams from `--config` (if it is there, first) and flags on top. Raises ParamError, or exits with usage."""
    import tyro

    default = RunParams()
    if argv and argv[0].split("=")[0] == "--config":
        name, *value = argv.pop(0).split("=", 1)
        if not value and not argv:
            raise ParamError("config", f"needs a file or one of the presets {', '.join(preset_names())}")
        default = load(value[0] if value else argv.pop(0))
    elif any(a.split("=")[0] == "--config" for a in argv):
        raise ParamError("config", "must come first, before the flags that change it")
    return tyro.cli(
        RunParams,
        default=default,
        args=argv,
        prog=f"mmfsdp {command} [--config C]",
        config=(tyro.conf.EnumChoicesFromValues,),
    )


def plan(argv: list[str]) -> int:
    """Print the plan and what it will cost."""
    params = parse("plan", argv)
    print_plan(params)
    return 0


def print_plan(params: RunParams) -> None:
    from .preview import preview

    plan, cost = preview(params)
    print(plan)
    print(cost)
    for finding in plan.lint:
        print(finding)


def launch(argv: list[str]) -> int:
    """Start the ranks and return."""
    from .launch import launch as start

    run = start(parse("launch", argv))
    print(f"{run.path}: started; follow it with `mmfsdp watch {run.path}`")
    return 0


def run(argv: list[str]) -> int:
    """The whole job in the foreground."""
    from .launch import launch as start

    began = time.time()
    params = parse("run", argv)
    print_plan(params)
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
        from .watch import bar

        ensure_backbones(params, progress=lambda label, done: print(bar(label, done), end="", flush=True))
        print()


def watch(argv: list[str]) -> int:
    """Follow a run."""
    return follow(one_run(argv))


def caption(argv: list[str]) -> int:
    """Caption new pictures with a finished run's checkpoint."""
    return finish(one_run(argv))


def one_run(argv: list[str]) -> Path:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ParamError("run", f"{' '.join(argv)!r} is not one run folder; name one, such as runs/demo")
    return Path(argv[0])


def follow(folder: Path) -> int:
    """Print a run's lines until it ends. Returns 0 if it completed."""
    from .launch import Run
    from .watch import follow as lines

    run = Run.open(folder)
    for line in lines(run.path):
        print(line)
    state = run.state()
    print(f"{run.name}: {state}")
    return 0 if state.ok else 1


def finish(folder: Path, *, since: float | None = None) -> int:
    """Caption held-out pictures, print five beside the truth, write result.json and the report."""
    from .evaluate import caption_held_out
    from .report import write_report

    result = caption_held_out(folder, since=since)
    for row in result["captions"][:5]:
        print(f"  {'=' if row['caption'] == row['truth'] else 'x'} {row['caption']:<48} truth: {row['truth']}")
    for key, value in result.items():
        if key not in ("captions", "skipped"):
            print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")
    for source, row in result.get("skipped", {}).items():
        if row["times"] or row["cut"]:
            print(f"  {source}: {row['records']} records skipped, {row['cut']} texts cut to data.max_length")
    print(f"report: {write_report(folder)}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan,
    "run": run,
    "launch": launch,
    "watch": watch,
    "caption": caption,
}
