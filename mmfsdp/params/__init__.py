"""Every choice of a run, as enums and frozen models. Imports no torch."""

from .base import ParamError
from .data import DataParams, MoreParams, SourceParams
from .data_sources import DataSource
from .enums import (
    AutoWrapPolicy,
    BackboneSource,
    Backend,
    BackwardPrefetch,
    Device,
    Executor,
    FrozenDtype,
    FrozenPolicy,
    GpusAs,
    Precision,
    ProjectorKind,
    Schedule,
    ShardingStrategy,
    StateDictType,
    TrackerKind,
)
from .fsdp import HYBRID, FSDPParams
from .launching import LaunchParams
from .model import GENERATED, BackboneParams, ModelParams
from .model_kinds import RECIPES, ModelKind
from .optimizers import OptimizerKind
from .run import RunParams, load, preset_names
from .train import TrainParams
