"""The files of clusters' profiles: YAML with launch fields, in folders of a class, of a person and of this package."""

from __future__ import annotations

import os
from pathlib import Path

from .base import ParamError, did_you_mean

FOLDER_VARIABLE = "MMFSDP_CLUSTERS"
"""Environment variable: a folder of profiles for a class or a group, which come before all others."""
SHIPPED = Path(__file__).resolve().parent / "presets" / "clusters"


def profile_folders() -> list[Path]:
    """Return the folders of profiles, the first to look in first. Raises ParamError where the variable names none."""
    folders = [Path("clusters"), Path(os.path.expanduser("~/.config/mmfsdp/clusters")), SHIPPED]
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        return folders
    folder = Path(os.path.expanduser(named))
    if not folder.is_dir():
        words = f"the variable {FOLDER_VARIABLE} names {named!r}, which is no folder on this machine; "
        raise ParamError("launch.cluster", f"{words}correct it, or unset it")
    return [folder, *folders]


def profile_names() -> list[str]:
    """Return the names of all profiles; those of the first folder first."""
    names: dict[str, None] = {}
    for folder in profile_folders():
        names.update(dict.fromkeys(sorted(path.stem for path in folder.glob("*.yaml"))))
    return list(names)


def profile_path(name: str) -> Path:
    """Return the file of a profile, by its name, or by its path if it ends in .yaml.

    Raises ParamError naming the folders and the profiles that are there.
    """
    paths = _paths_of(name)
    for path in paths:
        if path.is_file():
            return path
    places = " and ".join(str(path.parent) for path in paths)
    hint = did_you_mean(name, profile_names())
    raise ParamError("launch.cluster", f"there is no profile {name!r} in {places}{hint}")


def hidden_profiles(name: str) -> list[Path]:
    """Return the files of the same name that are not read, because another comes before them."""
    return [path for path in _paths_of(name) if path.is_file()][1:]


def _paths_of(name: str) -> list[Path]:
    if name.endswith(".yaml"):
        return [Path(os.path.expanduser(name))]
    return [folder / f"{name}.yaml" for folder in profile_folders()]
