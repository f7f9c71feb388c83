"""Enums and dataclasses of a whole run. Imports no torch."""

from .check import ParamError
from .data import DataParams, MoreParams, SourceParams
from .enums import (
    AutoWrapPolicy,
    BackboneSource,
    Backend,
    BackwardPrefetch,
    DataSource,
    Device,
    Executor,
    FrozenPolicy,
    Modality,
    ModelKind,
    Precision,
    ProjectorKind,
    Schedule,
    ShardingStrategy,
    StateDictType,
    Task,
)
from .fsdp import FSDPParams
from .launch import LaunchParams
from .model import GENERATED, RECIPES, BackboneParams, EncoderParams, ModelParams
from .presets import load, preset_names
from .run import RunParams
from .train import TrainParams

__all__ = [
    "GENERATED",
    "RECIPES",
    "AutoWrapPolicy",
    "BackboneParams",
    "BackboneSource",
    "Backend",
    "BackwardPrefetch",
    "DataParams",
    "DataSource",
    "Device",
    "EncoderParams",
    "Executor",
    "FSDPParams",
    "FrozenPolicy",
    "LaunchParams",
    "Modality",
    "ModelKind",
    "ModelParams",
    "MoreParams",
    "ParamError",
    "Precision",
    "ProjectorKind",
    "RunParams",
    "Schedule",
    "ShardingStrategy",
    "SourceParams",
    "StateDictType",
    "Task",
    "TrainParams",
    "load",
    "preset_names",
]
