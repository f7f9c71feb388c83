"""RunParams: all parameters of a run; the presets to start from; and the profiles of clusters."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from .base import ANY_OTHER, ParamError, Params, did_you_mean, read_yaml, unknown_key
from .data import DataParams
from .enums import Executor, StateDictType
from .fsdp import FSDPParams
from .launching import SLURM_FIELDS, LaunchParams
from .model import ModelParams
from .profiles import profile_path
from .train import TrainParams

PRESETS = Path(__file__).resolve().parent / "presets"
_CLUSTER_FIELDS = (*(name for name in SLURM_FIELDS if name not in ("cluster", "nodes")), "timeout_min")
_JOINED = ("gres", "modules", "setup", "sbatch", "srun")


class RunParams(Params):
    """One training run. The same object drives the form, the command line and every rank."""

    model: ModelParams = ModelParams()
    """The backbones, and the modules that are added to them."""

    data: DataParams = DataParams()
    """The samples that it is trained on."""

    train: TrainParams = TrainParams()
    """For how long, and how fast it learns."""

    fsdp: FSDPParams = FSDPParams()
    """Sharding of the model over the ranks."""

    launch: LaunchParams = LaunchParams()
    """Start of the ranks, and the run folder."""

    def why_unavailable(self, name: str, value: Any = ANY_OTHER) -> tuple[str, str]:
        """Return why the field of this dotted name (fsdp.frozen_policy) cannot have this value, and what to change."""
        section, _, field = name.partition(".")
        if not field or field not in type(getattr(self, section)).model_fields:
            return "", ""
        why, fix = getattr(self, section).why_unavailable(field, value)
        return why, fix

    def why_idle(self, name: str) -> str:
        """Return why no value of the field of this dotted name changes anything; "" if one does."""
        section, _, field = name.partition(".")
        if not field or field not in type(getattr(self, section)).model_fields:
            return ""
        reason: str = getattr(self, section).why_idle(field)
        return reason

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        replicate, shard = self.fsdp.dp_replicate, self.fsdp.dp_shard
        ranks = self.launch.ranks
        if replicate and shard and ranks is not None and replicate * shard != ranks:
            message = f"{replicate} x dp_shard {shard} makes {replicate * shard} ranks, but launch.ranks is "
            raise ParamError("fsdp.dp_replicate", message + f"{ranks}; change one of the three")
        if self.train.ema is not None and self.fsdp.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            message = f"{self.train.ema} cannot be saved with fsdp.state_dict_type LOCAL_STATE_DICT; use "
            raise ParamError("train.ema", f"{message}SHARDED_STATE_DICT")
        for step, patterns in self.train.freeze_from.items():
            field = f"train.freeze_from.{step}"
            if self.fsdp.state_dict_type is StateDictType.LOCAL_STATE_DICT:
                message = "a LOCAL_STATE_DICT cannot be loaded once other parameters train; "
                raise ParamError(field, f"{message}set fsdp.state_dict_type to SHARDED_STATE_DICT")
            try:
                self.model.change(freeze=patterns)
            except ParamError as error:
                raise ParamError(field, error.message) from None
        if self.model.kind.takes.own_processor:
            for name in ("augment", "feature_cache"):
                if getattr(self.data, name):
                    reason = f"has no effect with model.kind {self.model.kind}, whose own processor reads the pictures"
                    raise ParamError(f"data.{name}", f"{getattr(self.data, name)!r} {reason}; remove it")
        return self


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load(name_or_path: str) -> RunParams:
    """Return a preset by name, or a YAML file by path. Raise ParamError naming the presets if it is neither."""
    if name_or_path in preset_names():
        return RunParams.from_yaml(PRESETS / f"{name_or_path}.yaml")
    if Path(name_or_path).is_file():
        return RunParams.from_yaml(name_or_path)
    if Path(name_or_path).is_dir():
        name = shlex.quote(name_or_path)
        words = f"{name_or_path!r} is a folder; `mmfsdp new my.yaml --pictures {name}` writes a configuration for the"
        raise ParamError("config", f"{words} pictures in it; of a run, give {name}/params.yaml")
    hint = did_you_mean(name_or_path, preset_names())
    raise ParamError("config", f"{name_or_path!r} is neither a file nor a preset{hint}")


class Cluster(Params):
    """A cluster's profile: one YAML file with launch fields and, under `machine`, figures for planning."""

    launch: LaunchParams = LaunchParams()
    """The launch fields of the profile; its other fields have their defaults."""

    machine: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Figures for planning, by the names of the fields of `predict.Machine`."""


def read_cluster(name: str) -> Cluster:
    """Return the profile of this name, or of this path if it ends in .yaml. Raise ParamError naming the mistake."""
    path = profile_path(name)
    try:
        values = read_yaml(path.read_bytes(), name="YAML") or {}
        if not isinstance(values, dict):
            raise ParamError("profile", "is not a mapping of field names to values")
        machine = values.pop("machine", {})
        for key in values:
            if key not in _CLUSTER_FIELDS:
                raise unknown_key(str(key), (*_CLUSTER_FIELDS, "machine"))
        return Cluster(launch=LaunchParams(executor=Executor.SLURM, **values), machine=machine)
    except ParamError as error:
        raise ParamError("launch.cluster", f"{path}: {error}") from None


def with_cluster(launch: LaunchParams) -> LaunchParams:
    """Return the launch with its profile's values where it has none itself; lists are joined, the profile's first."""
    if launch.cluster is None:
        return launch
    profile = read_cluster(launch.cluster).launch
    changes: dict[str, Any] = {"cluster": None}
    for name in _CLUSTER_FIELDS:
        if launch.unavailable(name):
            continue  # the job that a step is in has its partition, and so on
        own, common = getattr(launch, name), getattr(profile, name)
        if name in _JOINED:
            changes[name] = common + own
        elif own is None:
            changes[name] = common
    return launch.change(**changes)
