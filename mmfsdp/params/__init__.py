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
    FrozenPolicy,
    Precision,
    Schedule,
    ShardingStrategy,
    StateDictType,
    Task,
)
from .fsdp import FSDPParams
from .model import GENERATED, BackboneParams, ModelParams
from .presets import load, preset_names
from .run import RunParams
from .train import LaunchParams, TrainParams

__all__ = [
    "GENERATED",
    "AutoWrapPolicy",
    "BackboneParams",
    "BackboneSource",
    "Backend",
    "BackwardPrefetch",
    "DataParams",
    "DataSource",
    "Device",
    "FSDPParams",
    "FrozenPolicy",
    "LaunchParams",
    "ModelParams",
    "MoreParams",
    "ParamError",
    "Precision",
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
