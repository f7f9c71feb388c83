"""Checkpoints: what was trained and all that goes on with it, complete only once the marker is there.

    checkpoints/step_00000100/
      *.safetensors             the model: torch.distributed.checkpoint's shards, one file, or a file per rank
      optimizer/*.safetensors   the optimizer's states, laid out alike
      ema/*.safetensors         the moving average of what trains, if one is kept (`train.ema`)
      ranks/00000.safetensors   the states of a rank's random generators
      complete.json             step, kind, ranks, names, checksums; written last, before the folder gets its name

Nothing here is ever unpickled: tensors are safetensors, the other files are JSON.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "loading": (
        "Resumed",
        "check_frozen",
        "count_changed",
        "frozen_checksums",
        "load",
        "load_average",
        "newest",
        "resume",
    ),
    "saving": ("Background", "save"),
    "steps": ("DamagedCheckpoint", "best", "best_of", "is_complete", "latest", "mark_best", "marker_of"),
}
"""Public names by module. Imported when asked for: listing checkpoints (steps.py) must not import torch."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"mmfsdp.checkpoint has no {name!r}")
