"""Import what a rank runs in less CPU time: without collecting garbage, and without packages that its run leaves out.

A rank of the demo spends most of its start on imports. Two parts of that serve nobody: Python's cyclic collector looks
through the growing modules again and again, and libraries import optional packages wherever they are installed.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....params import BackboneParams, BackboneSource, RunParams
from ....params.own import own_fields
from ..rank_count import is_on_cpu

OF_MODELS = ("open_clip", "transformers.models.llama.modeling_llama")
"""Modules that most models are built with, and that take longest to import."""
AHEAD_OF_RUNS = (
    "mmfsdp.kit.run.ranks.forked_ranks",
    "mmfsdp.kit.run.supervisor",
    "mmfsdp.kit.run.launchers.local_launcher",
    "mmfsdp.kit.run.ranks.rank",
    "mmfsdp.kit.train.evaluate",
    "mmfsdp.kit.train.prepare",
    "mmfsdp.kit.models.build",
    *OF_MODELS,
)
"""Modules that the warm process imports before it forks the processes of local runs (warm.py)."""
AHEAD_OF_FUNCTIONS = (*OF_MODELS, "mmfsdp.kit.train.job")
"""Modules that are imported before the ranks of a function are forked (kit/spawn_ranks.py)."""
AHEAD_OF_CELLS = (
    "torch._dynamo",
    "mmfsdp.kit.models",
    "mmfsdp.core.wrap",
    "mmfsdp.kit.train.profile",
    "mmfsdp.kit.cli",
)
"""Modules that are imported before the ranks of a `%%ranks` cell are forked: those that the course uses."""


@contextmanager
def rank_imports(params: RunParams | None) -> Iterator[None]:
    """Import without collections, and from then on without the packages that these parameters do not use.

    For the process of a rank only: packages stay left out, and modules stay out of the collector's sight, for good.
    params: None leaves out no package, for an entry whose parameters say nothing about its imports.
    """
    for name in unused_packages(params) if params else ():
        # The import system's own way to say "not installed" (Python reference, 5.3.1): the import raises
        # ModuleNotFoundError, for which libraries with optional packages are prepared.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    with without_collections():
        yield
    gc.freeze()  # later collections would look through all modules


@contextmanager
def without_collections() -> Iterator[None]:
    """Do not collect cyclic garbage in this block: collections take a fifth of the import of torch and transformers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unused_packages(params: RunParams) -> list[str]:
    """Return the packages that libraries would import, and that no rank of this run uses.

    None for a run with a person's own code, which may use all that is installed.
    """
    if own_fields(params):
        return []
    model = params.model
    unused = ["wandb"]  # imported by timm and accelerate; a process of its own hands metrics to trackers
    if not model.lora_rank:
        unused.append("accelerate")  # imported by transformers; of what a rank calls, only peft needs it
    if not model.unavailable("vision") and is_without_timm(model.vision):
        unused.append("timm")  # imported by open_clip
    if is_on_cpu(params.train.device) and not params.fsdp.compile_units:
        unused.append("triton")  # imported by torch._dynamo, which torch's optimizers and DTensor import
    return unused


def bring_back(name: str) -> None:
    """Let a package be imported that `rank_imports` has left out."""
    if sys.modules.get(name, sys) is None:
        del sys.modules[name]


def is_without_timm(vision: BackboneParams) -> bool:
    """Return True for an encoder of open_clip that is known to be none of timm's, by its configuration."""
    if vision.source is not BackboneSource.OPEN_CLIP:
        return False
    config: dict[str, Any] = {**known_config(vision.name), **vision.config}
    tower = config.get("vision_cfg")
    return isinstance(tower, dict) and "timm_model_name" not in tower


def known_config(name: str) -> dict[str, Any]:
    """Return open_clip's configuration of a model name, read from its file: importing open_clip imports timm.

    Empty for any other name.
    """
    package = find_spec("open_clip")
    if not name or package is None or package.origin is None:
        return {}
    path = Path(package.origin).parent / "model_configs" / f"{name.replace('/', '-')}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
