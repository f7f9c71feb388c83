"""Layout: what writes a run's model into a folder, and what loads it again. A kind of model names its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...params import ModelKind, ModelParams, ParamError, RunParams
from ...params.enums import LAYOUTS, imported
from ..data.processor import SampleProcessor
from ..models.kinds import kind_of

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """A run's model that is to be written, unwrapped and with the weights of its checkpoint."""

    run: Path
    params: RunParams
    model: Any
    """The model, which a layout may take apart."""
    processor: SampleProcessor


@dataclass(frozen=True)
class Layout:
    """A layout of an export."""

    write: Callable[[Exported, Path], None]
    """Write a model into a new folder."""
    load: Callable[[RunParams, Path], nn.Module] | None = None
    """Load such a folder as the programs that the layout is for; None if `verify` does not try that."""
    check: Callable[[RunParams], None] = lambda params: None
    """Raise ParamError for a run that cannot be written so."""


def layout_of(params: ModelParams, name: str) -> Layout:
    """Return a kind's layout of a name. Raises ParamError for one that does not suit the kind."""
    path = kind_of(params).layouts.get(name)
    if path is None:
        kinds = ", ".join(kind for kind in ModelKind if name in kind.load().layouts)
        raise ParamError("layout", f"{name} is for model.kind {kinds}, not {params.kind}; use {LAYOUTS[0]}")
    layout: Layout = imported(path)
    return layout
