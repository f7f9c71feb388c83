"""Checkpoints: what was trained and all that goes on with it, complete only once the marker is there.

    checkpoints/step_00000100/
      *.safetensors             the model: torch.distributed.checkpoint's shards, one file, or a file per rank
      optimizer/*.safetensors   the optimizer's states, laid out alike
      ranks/00000.safetensors   the random states of a rank
      complete.json             step, kind, ranks, names, checksums; written last, before the folder gets its name

Nothing here is ever unpickled: tensors are safetensors, the rest is JSON.
"""

from .background import Background
from .core import Resumed, load, resume, save
from .folder import DamagedCheckpoint, latest, marker_of, newest
from .frozen import check_frozen, count_changed, frozen_checksums

__all__ = [
    "Background",
    "DamagedCheckpoint",
    "Resumed",
    "check_frozen",
    "count_changed",
    "frozen_checksums",
    "latest",
    "load",
    "marker_of",
    "newest",
    "resume",
    "save",
]
