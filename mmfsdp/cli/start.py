"""The commands that start ranks: run, launch, resume."""

from __future__ import annotations

import time
from shlex import quote

from ..params import RunParams
from .follow import finish, follow
from .plan import check_plan, print_plan
from .words import one_run, parse


def run(argv: list[str]) -> int:
    """The whole job in the foreground."""
    from ..launch import launch as start
    from ..launch.start import check

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
    from ..build import needs_backbones

    if needs_backbones(params.model):
        from ..pretrain import ensure_backbones
        from ..watch import Bar

        print("the preset's backbones are pretrained here, once: minutes, and later runs find them")
        bar = Bar()
        ensure_backbones(params, progress=bar)
        bar.end()


def launch(argv: list[str]) -> int:
    """Start the ranks and return; with `--dry-run`, print what sbatch would receive."""
    from ..launch import launch as start
    from ..launch import sbatch_text
    from ..launch.start import check

    if "--dry-run" in argv:
        print(sbatch_text(parse("launch", [a for a in argv if a != "--dry-run"])), end="")
        return 0
    params = parse("launch", argv)
    check(params)
    check_plan(params)
    run = start(params)
    print(f"{run.path}: started; follow it with `mmfsdp watch {quote(str(run.path))}`")
    return 0


def resume(argv: list[str]) -> int:
    """Go on with a run in its folder, from its newest complete checkpoint or an older one."""
    from ..launch import Run
    from ..params.flags import number_taken

    step = number_taken(argv, "--step", "steps")
    run = Run.open(one_run(argv[:1]))
    params = parse("resume RUN", argv[1:], default=run.params)
    if argv[1:]:
        check_plan(params)  # what was asked for may not be what has run
    run.resume(step=step, params=params)
    return 1 if follow(run.path) else finish(run.path)
