"""`mmfsdp bench startup`: what a person waits for: imports, the form, launch(), and the first step of the demo."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ..launch import launch
from ..params import RunParams, load
from ..preview import preview
from ..runs import read_metrics

IMPORTS = {
    "Python": "pass",
    "import mmfsdp": "import mmfsdp",
    "import torch": "import torch",
    "torch, its FSDP and checkpoints, transformers": (
        "import torch.distributed.fsdp, torch.distributed.checkpoint, transformers.modeling_utils"
    ),
    "all that a rank imports": "import mmfsdp.train",
    "a form": "from mmfsdp.widgets import RunForm; RunForm('tiny'); import sys; assert 'torch' not in sys.modules",
}
"""Whole processes, each by what it runs."""


def bench_startup(*, config: str = "tiny", rounds: int = 3) -> dict[str, Any]:
    """Seconds, medians of interleaved rounds: processes that import; launch(); from the call to the end of the first
    step, by part; and the same once more with another learning rate. The run's backbones must be there already: they
    are pretrained once, in the first run.

    As by a click: the plan has been drawn before. config: a preset or a YAML file. rounds: at least 1.
    """
    found: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    with TemporaryDirectory() as folder:
        params = load(config).change(**{"launch.folder": folder, "train.steps": 2, "train.warmup_steps": 0})
        preview(params)  # a form has drawn it when Launch is clicked; where nothing has, launching asks a process first
        for number in range(rounds):
            for what, code in IMPORTS.items():
                began = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
                found.setdefault(what, []).append(time.perf_counter() - began)
            for again, lr in enumerate((params.train.lr, params.train.lr / 2)):
                one = params.change(**{"launch.name": f"run{number}{again}", "train.lr": lr})
                seconds, startup = _first_step(one)
                found.setdefault("launch() returns", []).append(seconds)
                what = "a second run, to its first step" if again else "to the end of the first step"
                found.setdefault(what, []).append(sum(startup.values()))
                for name, part in startup.items():
                    parts.setdefault(name, []).append(part)
    return {
        "config": config,
        "rounds": rounds,
        "seconds": {what: median(seconds) for what, seconds in found.items()},
        "first_step": {name: median(seconds) for name, seconds in parts.items()},
    }


def _first_step(params: RunParams) -> tuple[float, dict[str, float]]:
    """(seconds of launch, those to the first step by part) of a run. Raises RuntimeError if it fails."""
    began = time.perf_counter()
    run = launch(params)
    returned = time.perf_counter() - began
    while not (state := run.state()).done:
        time.sleep(0.05)
    if not state.ok:
        raise RuntimeError(f"{state}\n{run.logs(0)}")
    return returned, read_metrics(Path(run.path))[0][0]["startup"]


def table(found: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{found['config']}; seconds, medians of {found['rounds']} rounds"]
    lines += [f"{what:<48}{seconds:>8.2f}" for what, seconds in found["seconds"].items()]
    return "\n".join([*lines, "of the first step:", *(f"  {k:<46}{s:>8.2f}" for k, s in found["first_step"].items())])
