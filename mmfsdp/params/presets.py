"""Named configurations, kept as YAML files in `mmfsdp/presets/` that people can read and copy."""

from __future__ import annotations

import difflib
from pathlib import Path

from .check import ParamError
from .run import RunParams

FOLDER = Path(__file__).resolve().parent.parent / "presets"


def preset_names() -> list[str]:
    """Names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name_or_path: str) -> RunParams:
    """A preset by name, or a YAML file by path. Raises ParamError naming the presets if it is neither."""
    if name_or_path in preset_names():
        return RunParams.from_yaml(FOLDER / f"{name_or_path}.yaml")
    if Path(name_or_path).is_file():
        return RunParams.from_yaml(name_or_path)
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        raise ParamError("config", f"there is no file {name_or_path!r} in {str(Path.cwd())!r}")
    near = difflib.get_close_matches(name_or_path, preset_names(), n=1, cutoff=0.5)
    hint = "".join(f"; did you mean {one}?" for one in near)
    raise ParamError(
        "config", f"{name_or_path!r} is neither a file nor a preset{hint}; the presets are {', '.join(preset_names())}"
    )
