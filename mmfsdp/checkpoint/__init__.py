"""Checkpoints: what was trained and all that goes on with it, complete only once the marker is there.

    checkpoints/step_00000100/
      *.safetensors             the model: torch.distributed.checkpoint's shards, one file, or a file per rank
      optimizer/*.safetensors   the optimizer's states, laid out alike
      ranks/00000.safetensors   the states of a rank's random generators
      complete.json             step, kind, ranks, names, checksums; written last, before the folder gets its name

Nothing here is ever unpickled: tensors are safetensors, the other files are JSON.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "Background": "saving",
    "DamagedCheckpoint": "steps",
    "Resumed": "loading",
    "check_frozen": "loading",
    "count_changed": "loading",
    "frozen_checksums": "loading",
    "latest": "steps",
    "load": "loading",
    "marker_of": "steps",
    "newest": "loading",
    "resume": "loading",
    "save": "saving",
}
"""Module of each public name. Imported when asked for: listing checkpoints (steps.py) must not import torch."""

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"mmfsdp.checkpoint has no {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
