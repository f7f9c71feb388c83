"""The commands that follow a run to its end, and what is shown of it then: watch, caption."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from ..loading import collector_paused
from .words import one_run


def watch(argv: list[str]) -> int:
    """Follow a run."""
    return follow(one_run(argv))


def follow(folder: Path) -> int:
    """Print a run's lines until it ends. Returns 0 if it completed."""
    from ..launch import Run
    from ..watch import follow as lines

    run = Run.open(folder)
    try:
        for line in lines(run.path):
            print(line)
    except KeyboardInterrupt:
        name = quote(str(folder))
        print(f"\n{run.name} goes on; `mmfsdp watch {name}` follows it, `mmfsdp cancel {name}` ends it", end="")
        raise
    state = run.state()
    print(f"{run.name}: {state}")
    return 0 if state.ok else 1


def caption(argv: list[str]) -> int:
    """Caption new pictures with a finished run's checkpoint."""
    from ..launch import Run

    return finish(Run.open(one_run(argv)).path)


def finish(folder: Path, *, since: float | None = None) -> int:
    """Caption held-out pictures, print five beside the truth, write result.json and the report."""
    with collector_paused(for_good=True):
        from ..evaluate import caption_held_out
    from ..launch import Run
    from ..report import write_report

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
