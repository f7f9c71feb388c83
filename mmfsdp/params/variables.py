"""Environment variables that name folders: in the paths of a run ($SCRATCH/runs), and that of the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .base import ParamError
from .run import RunParams

PATHS = ("folder", "path", "pictures", "heldout", "weights", "name")
"""The last words of the fields of `launch`, `data` and `model` that hold a path."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def backbone_cache() -> Path:
    """Return the folder of pretrained small backbones: $MMFSDP_CACHE, or mmfsdp in the user's cache folder.

    Raises RuntimeError for a user without a home.
    """
    folder = os.environ.get("MMFSDP_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "mmfsdp")
    return Path(folder).expanduser()


def with_variables(params: RunParams) -> RunParams:
    """Return the parameters with $NAME and ${NAME} expanded in their paths: of the run folder, the data and the models.

    The ranks find the paths as they are now, whatever their node's environment has. Raises ParamError that names the
    field and the variable if it is not set.
    """
    values = params.to_dict()
    for section in ("launch", "data", "model"):
        values[section] = _expanded(values[section], section)
    start = values["train"].get("start_from")
    if start is not None:
        values["train"]["start_from"] = _expanded(start, "train.path")
    return RunParams.from_dict(values) if values != params.to_dict() else params


def _expanded(value: Any, name: str) -> Any:
    """Return nested values with the variables in their paths expanded. name: dotted, of the value."""
    if isinstance(value, dict):
        return {key: _expanded(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, f"{name}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, str) or name.rpartition(".")[2] not in PATHS or name == "launch.name":
        return value

    def expand(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        if variable not in os.environ:
            raise ParamError(name, f"{value!r}: the variable {variable} is not set; set it, or write the path in full")
        return os.environ[variable]

    return _VARIABLE.sub(expand, value)
