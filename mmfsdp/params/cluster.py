"""Cluster profiles: one YAML file per cluster, with values for the Slurm fields that a run leaves unset."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from .check import ParamError, need, unknown_key
from .enums import Executor
from .launch import LaunchParams

_GIVES = tuple(f.name for f in fields(LaunchParams) if f.default in (None, ()) and f.name not in ("threads", "cluster"))
"""What a profile may say of a launch: the Slurm fields that can be unset."""


@dataclass(frozen=True)
class Cluster:
    """A profile."""

    launch: dict[str, Any]
    """Values of launch fields."""
    machine: dict[str, float] = field(default_factory=dict)
    """Figures for planning, by the names of `estimate.Machine`'s fields."""


def folders() -> tuple[Path, Path]:
    """Where profiles are looked for, first to last."""
    return Path("clusters"), Path(os.path.expanduser("~/.config/mmfsdp/clusters"))


def cluster_names() -> list[str]:
    """Profiles that can be called by name."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def read_cluster(name: str) -> Cluster:
    """The profile of this name, or of this path if it ends in .yaml. Raises ParamError naming what is wrong."""
    own = name.endswith(".yaml")
    tried = [Path(os.path.expanduser(name))] if own else [folder / f"{name}.yaml" for folder in folders()]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        places = " and ".join(str(path) for path in tried)
        known = ", ".join(cluster_names()) or "none"
        raise ParamError("launch.cluster", f"{name!r} is not there: looked for {places}; known by name: {known}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamError("launch.cluster", f"{path} is not YAML: {error}") from None
    try:
        return _checked(values)
    except ParamError as error:
        raise ParamError("launch.cluster", f"{path}: {error}") from None


def settled(launch: LaunchParams) -> LaunchParams:
    """The same launch with its profile's values where it has none of its own. Raises ParamError."""
    if launch.cluster is None:
        return launch
    given = read_cluster(launch.cluster).launch
    lists = {k: (*v, *getattr(launch, k)) for k, v in given.items() if isinstance(v, tuple)}
    return replace(launch, cluster=None, **{k: v for k, v in given.items() if getattr(launch, k) is None} | lists)


def _checked(values: Any) -> Cluster:
    need(isinstance(values, Mapping), "profile", "is not a mapping of field names to values")
    values = dict(values)
    machine = values.pop("machine", {})
    figures = isinstance(machine, Mapping) and all(type(v) in (int, float) and v > 0 for v in machine.values())
    need(figures, "machine", f"{machine!r} is not a mapping of names to numbers above 0")
    for key in values:
        if key not in _GIVES:
            raise unknown_key(str(key), (*_GIVES, "machine"))
    checked = LaunchParams(executor=Executor.SLURM, **values)
    return Cluster({key: getattr(checked, key) for key in values}, dict(machine))
